"""The study's text: long real documents as tokens, and prompts with things hidden in them.

It needs no GPU, and a network. OUT/text is all that the other parts read, so that it can be made on
one machine and carried to another. OUT/packages keeps what pip fetched, OUT/documents the documents
as text; they can be deleted.

Code is that of the installed packages. Prose is their descriptions, Python's language reference,
and the documentation of the source distributions in sdists.txt. Mixed is half documentation, half
code, of other distributions: code refers to what its documentation explains. A document is text of
one package, about four contexts long, or one context where it is held out, so that windows are from
many. Held out are whole packages. Licenses are left out.
"""

import hashlib
import json
import os
import pydoc_data.topics
import re
import site
import sys
import sysconfig
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from scripts.study.real_model import check_digest, fetch
from scripts.study.settings import Size, read_json
from titan_sparse.config import Config
from titan_sparse.config.reading import Refusal
from titan_sparse.data.documents import NOT_STDLIB, open_documents
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.shards import token_dtype, write_json
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.evaluation.answers import Sample
from titan_sparse.evaluation.needle import depths, needle_samples

Packages = dict[str, list[str]]
"""The texts of each package, in order."""
SDISTS = Path(__file__).with_name("sdists.txt")
DONE = "text.json"
"""Written last: a folder that has it is whole."""
_CHARACTERS_PER_TOKEN = 4
_CONTEXTS = 4
_CONTEXTS_HELD_OUT = 1.1
_HELD_OUT_DOCUMENTS = 16
"""Of each kind, at most."""
_HELD_OUT_CODE = 0.05
"""Share of the code that is not trained on."""
_DOCUMENTATION = (".rst", ".md", ".txt")
_LEFT_OUT = re.compile(
    r"licen[cs]e|copying|copyright|authors|changelog|relnotes|status\.txt|unicover", re.IGNORECASE
)
"""Files that are no text to learn from."""
_SEED = 0


def prepare_text(out: Path, model: Path, size: Size) -> dict[str, Any]:
    """Write OUT/text: tokens to train on (train) and held out (code, prose, mixed), and prompts.

    model: folder with the tokenizer. Returns what OUT/text/text.json says; where that is there,
    nothing is done. Raises Refusal, one line, without a network, and if there is too little text.
    """
    folder = out / "text"
    if (folder / DONE).is_file():
        return read_json(folder / DONE)
    training, held_out = split(out / "packages", size)
    about: dict[str, Any] = {"held_out": {kind: sorted(held_out[kind]) for kind in held_out}}
    window = size.context * _CHARACTERS_PER_TOKEN
    for kind, packages in training.items():
        most = size.text[kind] * window
        write_documents(out / "documents/train", packages, kind, _CONTEXTS * window, most)
    about["train"] = _tokenize(out / "documents/train", folder / "train", model, size)
    for kind, packages in held_out.items():
        source = out / f"documents/{kind}"
        least = round(_CONTEXTS_HELD_OUT * window)
        write_documents(source, packages, kind, least, _HELD_OUT_DOCUMENTS * least)
        about[kind] = _tokenize(source, folder / kind, model, size)
    write_prompts(folder, size)
    write_json(folder / DONE, about)
    return about


def split(cache: Path, size: Size) -> tuple[dict[str, Packages], dict[str, Packages]]:
    """Packages to train on and those that are held out, by kind. Raises Refusal as above."""
    code = installed_code(size.most_characters)
    names = choose_held_out(code, size.context)
    training = {"code": {name: code[name] for name in code.keys() - names}}
    held_out = {"code": {name: code[name] for name in names}}
    prose = installed_prose()
    if not size.has_sdists:
        name = max(prose, key=lambda name: sum(map(len, prose[name])))
        held_out["prose"] = {name: prose.pop(name)}
        training["prose"] = prose
        return training, held_out
    training |= {"prose": prose, "mixed": {}}
    held_out |= {"prose": {}, "mixed": {}}
    for file, sha256, kind, side in _sdists():
        # NAME-VERSION.tar.gz
        name, _, version = file.removesuffix(".tar.gz").rpartition("-")
        fetch(f"{name}=={version}", cache / file, "--no-binary", name)
        check_digest(cache / file, sha256, str(cache / file))
        packages = held_out if side == "held_out" else training
        packages[kind][name] = sdist_texts(cache / file, kind)
    return training, held_out


def _sdists() -> list[list[str]]:
    """[file, sha256, kind, side] of each line of sdists.txt."""
    lines = SDISTS.read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def choose_held_out(packages: Packages, context: int) -> set[str]:
    """Packages of at least two contexts and at most a tenth of all text.

    In an order by hash of their names, until they hold 5 % of it. Raises Refusal if there is
    none.
    """
    sizes = {name: sum(map(len, texts)) for name, texts in packages.items()}
    total = sum(sizes.values())
    least = 2 * _CHARACTERS_PER_TOKEN * context
    reached = 0
    chosen = set()
    for name in sorted(sizes, key=_hash):
        if reached < _HELD_OUT_CODE * total and least <= sizes[name] <= total / 10:
            chosen.add(name)
            reached += sizes[name]
    if not chosen:
        raise Refusal(
            f"none of the {len(sizes)} packages installed here has two contexts of {context} "
            "tokens and at most a tenth of all text, so that none can be held out; "
            "install more packages"
        )
    return chosen


def installed_code(most_characters: int) -> Packages:
    """Texts of the Python files installed on this machine, by top-level package.

    Each is headed by its name. Files are in the order of their names, up to `most_characters` of a
    package. Exact copies of a file come once. What sdists.txt names is left out.
    """
    packages: Packages = defaultdict(list)
    characters: Counter[str] = Counter()
    seen = set()
    in_sdists = {file.rpartition("-")[0] for file, *_ in _sdists()}
    for name, path in sorted(_python_files()):
        package = name.partition("/")[0] if "/" in name else "modules"
        if package in in_sdists:
            continue
        if characters[package] + path.stat().st_size > most_characters:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or not content.strip():
            continue
        seen.add(digest)
        packages[package].append(_headed(name, content))
        characters[package] += len(content)
    return dict(packages)


def _python_files() -> Iterator[tuple[str, Path]]:
    """(name below its root, path); the standard library, and what is installed next to it."""
    for root in _installed_roots():
        for folder, folders, files in os.walk(root):
            # In place: os.walk goes on by this list. Packages below the standard library have a
            # root of their own.
            folders[:] = [
                name for name in folders if name not in NOT_STDLIB and name != "__pycache__"
            ]
            for name in files:
                path = Path(folder, name)
                if name.endswith(".py") and path.is_file():
                    yield path.relative_to(root).as_posix(), path


def _installed_roots() -> list[Path]:
    names = ("stdlib", "purelib", "platlib")
    paths = [*map(sysconfig.get_path, names), *site.getsitepackages()]
    # Folders that a .pth file adds are installed packages too.
    paths += [path for path in sys.path if Path(path).name in NOT_STDLIB]
    return sorted({Path(path).resolve() for path in paths})


def installed_prose() -> Packages:
    """The descriptions of the installed Python packages, and Python's language reference."""
    descriptions = []
    for root in _installed_roots():
        for path in sorted(root.glob("*.dist-info/METADATA")):
            # After the headers, the long description.
            _, _, description = path.read_bytes().partition(b"\n\n")
            descriptions.append(_headed(path.parent.name, description))
    reference = []
    for name, topic in sorted(pydoc_data.topics.topics.items()):
        reference.append(_headed(name, topic.encode()))
    return {"descriptions": descriptions, "reference": reference}


def _headed(name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace").replace("\0", "")
    return f"# {name}\n{text}\n"


def sdist_texts(path: Path, kind: str) -> list[str]:
    """Texts of an sdist: its documentation, and for the kind mixed as many characters of code.

    Code comes between documentation at equal shares, both in the order of their names.
    """
    prose, code = [], []
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        for member in members:
            # Without the folder of the archive, which has the version in its name.
            name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or "tests" in name.parts:
                continue
            in_docs = name.parts[0] in ("doc", "docs") and name.suffix in _DOCUMENTATION
            if in_docs and not _LEFT_OUT.search(name.as_posix()):
                prose.append(_headed(name.as_posix(), archive.extractfile(member).read()))
            elif kind == "mixed" and name.suffix == ".py":
                code.append(_headed(name.as_posix(), archive.extractfile(member).read()))
    return prose if kind == "prose" else interleave(prose, code)


def interleave(first: list[str], second: list[str]) -> list[str]:
    """Texts of two lists in turns, so that both have as many characters at each place.

    Ends with the shorter list.
    """
    mixed: list[str] = []
    lead = 0  # characters of `first` that `second` is behind
    left = iter(first)
    right = iter(second)
    while (text := next(left if lead <= 0 else right, None)) is not None:
        mixed.append(text)
        lead += len(text) if lead <= 0 else -len(text)
    return mixed


def write_documents(folder: Path, packages: Packages, kind: str, least: int, most: int) -> None:
    """A folder for each document of at least `least` characters, until there are `most` of them.

    In the order of their names the first of each package come first, and packages mix.
    """
    found = {}
    for name, texts in packages.items():
        for number, text in enumerate(documents(texts, least)):
            found[f"{number:04}-{_hash(name)[:8]}-{kind}-{name}"] = text
    written = 0
    for name in sorted(found):
        if written >= most:
            break
        written += len(found[name])
        path = folder / name / "text"
        # Written anew it would have another time, and its tokens be refused.
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(".text")
            unfinished.write_text(found[name], encoding="utf-8")
            unfinished.rename(path)


def documents(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts one after the other, joined until they reach `characters`; the last may be shorter."""
    joined = ""
    for text in texts:
        joined += text
        if len(joined) >= characters:
            yield joined
            joined = ""
    if joined:
        yield joined


def _tokenize(source: Path, out: Path, model: Path, size: Size) -> dict[str, Any]:
    """Write the tokens of a folder of documents; returns how many."""
    recipe = Recipe(str(source), tokenizer=str(model), document="folder")
    # Processes take seconds to start, which a toy does not need.
    processes = (os.cpu_count() or 1) if size.has_sdists else 1
    meta = prepare(recipe, str(out), processes)
    about = {key: meta[key] for key in ("documents", "tokens")}
    print(f"{out.name}: {about}", flush=True)
    return about


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def write_prompts(folder: Path, size: Size) -> None:
    """Write folder/prompts.json and prompts.npy, hidden in the prose that is held out.

    Raises Refusal for a length that does not hold a needle and its question.
    """
    tokenizer = load_tokenizer(str(folder / "prose"))
    config = Config()
    config.data.source = str(folder / "prose")
    config.data.tokenizer = str(folder / "prose")
    documents = open_documents(config.data, tokenizer)
    samples = needle_samples(
        documents, list(size.lengths), depths(size.depths), size.needles, _SEED
    )
    records = []
    for sample in samples:
        records.append(asdict(sample) | {"prompt": len(sample.prompt), "answer": sample.answer})
    tokens = np.concatenate([sample.prompt for sample in samples])
    np.save(folder / "prompts.npy", tokens.astype(token_dtype(tokenizer.vocab_size)))
    text = json.dumps(records, default=lambda ids: ids.tolist())
    (folder / "prompts.json").write_text(text + "\n", encoding="utf-8")


def read_prompts(folder: Path) -> list[Sample]:
    tokens = np.load(folder / "prompts.npy").astype(np.int64)
    samples = []
    start = 0
    for record in read_json(folder / "prompts.json"):
        stop = start + record["prompt"]
        record["prompt"] = tokens[start:stop]
        record["answer"] = np.array(record["answer"], dtype=np.int64)
        record["references"] = tuple(record["references"])
        samples.append(Sample(**record))
        start = stop
    return samples
