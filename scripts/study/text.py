"""The study's part 0: long real documents as tokens, and prompts with things hidden in them.

It needs no GPU, and a network. OUT/text is all that the other parts read, so that it can be made on
one machine and carried to another. OUT/packages keeps what pip fetched, OUT/documents the documents
as text; they can be deleted.

A document is text of one package, about four contexts long; one context where it is held out, so
that windows are from many. Held out are whole packages.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.study.packages import (
    SDISTS,
    Packages,
    fetch_sdist,
    installed_code,
    installed_prose,
    sdist_texts,
)
from scripts.study.prompts import write_prompts
from scripts.study.sizes import TextSize
from titan_sparse.data.preparing import Recipe, prepare

DONE = "text.json"
"""Written last: a folder that has it is whole."""
_CHARACTERS_PER_TOKEN = 4
_CONTEXTS = 4
_CONTEXTS_HELD_OUT = 1.1
_HELD_OUT_CODE = 0.05
"""Share of the code that is not trained on."""


def prepare_text(out: Path, model: Path, size: TextSize) -> dict[str, Any]:
    """Write OUT/text: tokens to train on (train) and held out (code, prose, mixed), and prompts.

    model: folder with the tokenizer. Returns what OUT/text/text.json says; where that is there,
    nothing is done. Raises ValueError, one line, without a network, and if there is too little text.
    """
    folder = out / "text"
    if (folder / DONE).is_file():
        return json.loads((folder / DONE).read_text(encoding="utf-8"))
    training, held_out = split(out / "packages", size)
    about: dict[str, Any] = {"held_out": {kind: sorted(held_out[kind]) for kind in held_out}}
    window = size.context * _CHARACTERS_PER_TOKEN
    for kind, packages in training.items():
        most = size.windows[kind] * window
        write_documents(out / "documents/train", packages, kind, _CONTEXTS * window, most)
    about["train"] = _tokenize(out / "documents/train", folder / "train", model, size)
    for kind, packages in held_out.items():
        source = out / f"documents/{kind}"
        most = size.held_out * round(_CONTEXTS_HELD_OUT * window)
        write_documents(source, packages, kind, round(_CONTEXTS_HELD_OUT * window), most)
        about[kind] = _tokenize(source, folder / kind, model, size)
    write_prompts(folder, size.asked)
    (folder / DONE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def split(cache: Path, size: TextSize) -> tuple[dict[str, Packages], dict[str, Packages]]:
    """Packages to train on and those that are held out, by kind. Raises ValueError as above."""
    code = installed_code(size.most_characters)
    names = choose_held_out(code, size.context)
    training = {"code": {name: code[name] for name in code.keys() - names}}
    held_out = {"code": {name: code[name] for name in names}}
    prose = installed_prose(size.most_characters)
    if not size.has_sdists:
        name = max(prose, key=lambda name: sum(map(len, prose[name])))
        held_out["prose"] = {name: prose.pop(name)}
        training["prose"] = prose
        return training, held_out
    training |= {"prose": prose, "mixed": {}}
    held_out |= {"prose": {}, "mixed": {}}
    for sdist in SDISTS:
        side = held_out if sdist.is_held_out else training
        path = fetch_sdist(sdist, cache)
        side[sdist.kind][sdist.name] = sdist_texts(path, sdist.kind)
    return training, held_out


def choose_held_out(packages: Packages, context: int) -> set[str]:
    """Packages of at least two contexts and at most a tenth of all text.

    In an order by hash of their names, until they hold 5 % of it. Raises ValueError if there is
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
        raise ValueError(
            f"none of the {len(sizes)} packages installed here has two contexts of {context} "
            "tokens and at most a tenth of all text, so that none can be held out; "
            "install more packages"
        )
    return chosen


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
    joined: list[str] = []
    length = 0
    for text in texts:
        joined.append(text)
        length += len(text)
        if length >= characters:
            yield "".join(joined)
            joined = []
            length = 0
    if joined:
        yield "".join(joined)


def _tokenize(source: Path, out: Path, model: Path, size: TextSize) -> dict[str, Any]:
    """Write the tokens of a folder of documents; returns how many."""
    recipe = Recipe(str(source), str(model), document="folder")
    # Processes take seconds to start, which a toy does not need.
    processes = (os.cpu_count() or 1) if size.has_sdists else 1
    meta = prepare(recipe, str(out), processes, lambda done, shards: None)
    about = {key: meta[key] for key in ("documents", "tokens")}
    print(f"{out.name}: {about}", flush=True)
    return about


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
