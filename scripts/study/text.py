"""The study's part 0: the Python files installed here as long documents, a tokenizer trained on them, and their tokens.

Text that any machine has without a network: real, with references over long distances.
"""

import hashlib
import json
import os
import site
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_sparse.data.preparing import Recipe, prepare
from titan_sparse.data.sources import NOT_STDLIB

DONE = "text.json"
"""Written last: a folder that has it is whole."""
_HELD_OUT = 0.03
"""Share of the text that is not trained on."""
_CHARACTERS_PER_TOKEN = 4
_TOKENIZER_CHARACTERS = 40_000_000
"""Text that the tokenizer is trained on."""


def prepare_text(
    folder: Path, vocab_size: int, context: int, most_characters: int
) -> dict[str, Any]:
    """Write texts (folder/train_texts, folder/validation_texts: a folder for each document), folder/tokenizer.json, and
    tokens, which data.source reads (folder/train, folder/validation). Returns what folder/text.json says of them; where
    that is there, nothing is done.

    A document is files of one package: about four times `context` tokens, and 1.5 times for validation, so that its
    windows are from many. Held out are whole packages. most_characters: of a package; 0: all. Raises
    ValueError if there are too few packages to hold one out.
    """
    if (folder / DONE).is_file():
        return json.loads((folder / DONE).read_text(encoding="utf-8"))
    packages = installed_packages(most_characters)
    held_out = choose_held_out(packages, context)
    if not (folder / "tokenizer.json").is_file():
        train_tokenizer(_sample(packages), vocab_size, folder / "tokenizer.json")
    about: dict[str, Any] = {"held_out": sorted(held_out), "packages": len(packages)}
    for name, chosen, contexts in (
        ("train", packages.keys() - held_out, 4),
        ("validation", held_out, 1.5),
    ):
        texts = {key: packages[key] for key in sorted(chosen)}
        _write(folder / f"{name}_texts", texts, round(contexts * context * _CHARACTERS_PER_TOKEN))
        recipe = Recipe(
            str(folder / f"{name}_texts"), str(folder / "tokenizer.json"), document="folder"
        )
        processes = 1 if most_characters else os.cpu_count() or 1
        meta = prepare(recipe, str(folder / name), processes, lambda done, shards: None)
        about[name] = {key: meta[key] for key in ("documents", "tokens")}
        about[name]["characters"] = sum(len(text) for part in texts.values() for text in part)
        print(f"{name}: {about[name]}", flush=True)
    (folder / DONE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def installed_packages(most_characters: int = 0) -> dict[str, list[str]]:
    """Texts of the Python files installed on this machine by top-level package, each headed by its name, in the order
    of their names, up to `most_characters` of each, 0: all. Exact copies of a file come once."""
    packages, characters, seen = defaultdict(list), Counter(), set()
    for name, path in sorted(_python_files()):
        package = name.partition("/")[0] if "/" in name else "modules"
        if most_characters and characters[package] + path.stat().st_size > most_characters:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or not content.strip():
            continue
        seen.add(digest)
        text = content.decode("utf-8", errors="replace").replace("\0", "")
        packages[package].append(f"# {name}\n{text}\n")
        characters[package] += len(text)
    return dict(packages)


def _python_files() -> Iterator[tuple[str, Path]]:
    """(name below its root, path); the standard library, and what is installed beside it."""
    names = ("stdlib", "purelib", "platlib")
    for root in sorted(
        {
            Path(path).resolve()
            for path in (*map(sysconfig.get_path, names), *site.getsitepackages())
        }
    ):
        for folder, folders, files in os.walk(root):
            # In place: os.walk goes on by this list. Packages below the standard library have a root of their own.
            folders[:] = [
                name for name in folders if name not in NOT_STDLIB and name != "__pycache__"
            ]
            prefix = Path(folder).relative_to(root)
            paths = (Path(folder, name) for name in files if name.endswith(".py"))
            yield from (((prefix / path.name).as_posix(), path) for path in paths if path.is_file())


def choose_held_out(packages: dict[str, list[str]], context: int) -> set[str]:
    """Packages of at least two contexts and at most a tenth of all text, in an order by hash of their names, until they
    hold 3 % of it. Raises ValueError if there is none."""
    sizes = {name: sum(map(len, texts)) for name, texts in packages.items()}
    total, reached, chosen = sum(sizes.values()), 0, set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if (
            reached < _HELD_OUT * total
            and 2 * _CHARACTERS_PER_TOKEN * context <= sizes[name] <= total / 10
        ):
            chosen.add(name)
            reached += sizes[name]
    if not chosen:
        raise ValueError(
            f"none of the {len(sizes)} packages installed here has two contexts of {context} tokens and "
            "at most a tenth of all text, so that none can be held out; install more packages"
        )
    return chosen


def _write(folder: Path, packages: dict[str, list[str]], least: int) -> None:
    """A folder with one file for each document of at least that many characters. Names begin with a hash, so that in
    their order packages mix."""
    for name, texts in packages.items():
        for number, text in enumerate(documents(texts, least)):
            document = f"{name}-{number:04}"
            path = (
                folder
                / f"{hashlib.sha256(document.encode()).hexdigest()[:8]}-{document}"
                / "source.py"
            )
            if (
                not path.exists()
            ):  # written anew it would have another time, and its tokens be refused
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_name(".source.py")
                unfinished.write_text(text, encoding="utf-8")
                unfinished.rename(path)


def documents(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts one after the other, joined until they reach `characters`; the last one may be shorter."""
    joined: list[str] = []
    for text in texts:
        joined.append(text)
        if sum(map(len, joined)) >= characters:
            yield "".join(joined)
            joined = []
    if joined:
        yield "".join(joined)


def _sample(packages: dict[str, list[str]]) -> Iterator[str]:
    """Every n-th file, so that all packages have their share."""
    texts = [text for name in sorted(packages) for text in packages[name]]
    return iter(texts[:: max(1, sum(map(len, texts)) // _TOKENIZER_CHARACTERS)])


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """A byte-level BPE of at most vocab_size tokens; each digit is a token, so that no number is rare."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>", "<|pad|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
