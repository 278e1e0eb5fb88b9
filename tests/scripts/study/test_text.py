"""The study's text: packages, what is held out, documents, prompts."""

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from scripts.study import text
from scripts.study.real_model import check_digest, fetch, train_tokenizer
from scripts.study.settings import TOY
from titan_sparse.data.tokenizer import load_tokenizer

SIZE = dataclasses.replace(
    TOY, context=64, text={"code": 50, "prose": 50}, lengths=(768, 1024), depths=3, needles=2
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = "One of the special magic numbers for the grass is green. VAR = Question: Answer: "
    train_tokenizer(iter([words * 20]), 512, folder / "tokenizer.json")
    return folder


def sdist_of(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "thing-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"thing-1.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


FILES = {
    "docs/a.rst": "a" * 100,
    "docs/LICENSE.txt": "no",
    "docs/changelog.rst": "no",
    "thing.egg-info/SOURCES.txt": "no",
    "thing/b.py": "b" * 100,
    "thing/c.py": "c" * 5000,
    "thing/tests/d.py": "no",
    "docs/e.md": "e" * 100,
}


def test_an_sdist_gives_its_documentation_and_as_much_code(tmp_path):
    path = sdist_of(tmp_path, FILES)
    prose = text.sdist_texts(path, "prose")
    assert [one.split("\n")[0] for one in prose] == ["# docs/a.rst", "# docs/e.md"]
    mixed = text.sdist_texts(path, "mixed")
    names = [one.split("\n")[0].removeprefix("# ") for one in mixed]
    assert names == ["docs/a.rst", "thing/b.py", "docs/e.md", "thing/c.py"]


def test_a_file_that_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = tmp_path / "thing-1.0.tar.gz"
    with pytest.raises(ValueError, match="cannot fetch thing==1.0 .* put thing-1.0.tar.gz") as e:
        fetch("thing==1.0", path)
    assert "\n" not in str(e.value)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="has sha256 .* delete it and run again"):
        check_digest(path, "0" * 64, str(path))


def test_held_out_packages_are_neither_small_nor_large():
    found = {"large": ["x" * 50_000], "small": ["x" * 10]}
    found |= {f"p{number}": ["x" * 900] for number in range(20)}
    chosen = text.choose_held_out(found, 100)
    # 3,600 of 68,010.
    assert len(chosen) == 4
    assert not chosen & {"large", "small"}
    with pytest.raises(ValueError, match="none of the 2 packages"):
        text.choose_held_out({"large": ["x" * 50_000], "small": ["x"]}, 100)


def test_text_that_was_stopped_goes_on(tmp_path, monkeypatch, tokenizer_folder):
    code = {}
    for number in range(12):
        line = f"def f{number}(): return the special magic numbers\n"
        code[f"p{number}"] = [f"# {file}\n{line * 60}" for file in range(3)]
    prose = {"large": ["The grass is green. " * 400], "small": ["The sky is blue. " * 100]}
    monkeypatch.setattr(text, "installed_code", lambda most: code)
    monkeypatch.setattr(text, "installed_prose", lambda: dict(prose))
    about = text.prepare_text(tmp_path, tokenizer_folder, SIZE)
    assert about["held_out"]["prose"] == ["large"] and about["train"]["tokens"] > 1000
    prompts = (tmp_path / "text/prompts.json").read_bytes()
    samples = text.read_prompts(tmp_path / "text")
    assert len(samples) == 2 * 3 * 2
    tokenizer = load_tokenizer(str(tokenizer_folder))
    for sample in samples:
        shown = tokenizer.decode(sample.prompt)
        assert all(reference in shown for reference in sample.references)
        assert sample.prompt.dtype == sample.answer.dtype == np.int64
        assert len(sample.prompt) + len(sample.answer) <= sample.length
    for name in ("text.json", "prose/meta.json", "train/shard_00000.json", "prompts.json"):
        (tmp_path / "text" / name).unlink()
    assert text.prepare_text(tmp_path, tokenizer_folder, SIZE) == about
    assert (tmp_path / "text/prompts.json").read_bytes() == prompts
