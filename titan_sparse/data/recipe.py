"""The inputs of titan-sparse prepare_data: rows of data.source, a folder of source files as long
documents, or MDS shards.

MDS (mosaicml-streaming) is the format in which ProLong's data are released. A row holds text, or
the token ids of some tokenizer as `input_ids`. If several documents share a row, `indices` holds
their [start, stop). (ProLong, princeton-nlp/prolong-data-512K, holds Llama-3 tokens.)
"""

import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_sparse.config.checking import check_formats
from titan_sparse.config.sections import Data, Text
from titan_sparse.config.sources import ending_of, files_below, in_words, source_weights
from titan_sparse.data.chat_template import run_texts
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.documents import (
    ROW_OPTIONS,
    LazyTexts,
    TokenizedTexts,
    file_states,
    join_files,
    open_source,
)
from titan_sparse.data.shards import is_prepared
from titan_sparse.data.tokenizer import Encoded, Tokenizer, load_tokenizer
from titan_sparse.options.values import Count, Tokens, check_value

logger = logging.getLogger("titan_sparse")

INDEX = "index.json"
"""The file that makes a folder one of MDS shards, and names them."""


@dataclass
class Recipe(Data):
    """Everything that decides what the shards hold: OPTIONS of [data], and these.

    source may also be a folder of repositories or of MDS shards.
    """

    tokenizer: Text = "bytes"
    """bytes, or the folder of a tokenizer, or its tokenizer.json"""
    source_tokenizer: str = ""
    """tokenizer.json that made the ids of MDS shards"""
    document: Literal["row", "folder", "source"] = "row"
    """one document is a row or file; the files of a folder directly in SOURCE (a repository, a
    package), joined; all files, joined"""
    min_length: Tokens = 0
    """leave shorter documents out; tokens, the end-of-document token not counted"""
    max_length: Tokens = 0
    """leave longer ones out; tokens; 0: none"""
    shard_rows: Count = 0
    """rows of a shard; 0: so many that there are about 128 shards"""

    @property
    def reads_mds(self) -> bool:
        """True if the source is a folder of MDS shards, and read as such."""
        return self.document == "row" and (Path(self.source).expanduser() / INDEX).is_file()


OPTIONS = ("tokenizer", "format", *ROW_OPTIONS, "split_special_tokens", "add_bos") + tuple(
    item.name for item in fields(Recipe)[len(fields(Data)) :]
)
"""Fields of Recipe that prepare_data has options for, and that plan.json holds."""


def prepare_command(data: Data, tokenizer: Tokenizer, model_folder: str = "") -> str:
    """The command that prepares one part of data.source as training would read it, into FOLDER.

    model_folder: model.initial_hf.
    """
    # By default a run takes the tokenizer of its model, and of its chat template if that has none.
    data = replace(data, tokenizer=data.tokenizer or str(tokenizer.folder or "bytes"))
    is_chats = data.format != "text"
    if is_chats and not run_texts(data, "", tokenizer) and run_texts(data, model_folder, tokenizer):
        data.chat_template = model_folder
    words = ["titan-sparse", "prepare_data", data.source, "FOLDER"]
    for name in OPTIONS:
        value = getattr(data, name, None)
        if value != getattr(Recipe(), name) and value is not None:
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
    return shlex.join(words)


def open_rows(recipe: Recipe, tokenizer: Tokenizer) -> TokenizedTexts:
    """Open the source of a recipe.

    Raises ValueError if it cannot be opened or an option would be ignored.
    """
    _refuse_unused(recipe)
    parts = list(source_weights(recipe.source))
    if len(parts) > 1:
        raise ValueError(
            f"{recipe.source} is a mixture; prepare each part, such as {parts[0]}, in a folder of its own"
        )
    if recipe.document == "row" and is_prepared(recipe.source):
        raise ValueError(
            f"{recipe.source} holds prepared tokens already; write the source that they were made of, or "
            "train with them"
        )
    if recipe.reads_mds:
        return MDSRows(recipe, tokenizer)
    if recipe.document != "row":
        texts = open_folder(recipe.source, whole=recipe.document == "source")
        return TokenizedTexts(texts, tokenizer, add_bos=recipe.add_bos)
    check_formats(recipe)
    encoder = None if recipe.format == "text" else ChatEncoder(recipe, tokenizer)
    return TokenizedTexts(open_source(recipe), tokenizer, encoder, recipe.add_bos)


def _refuse_unused(recipe: Recipe) -> None:
    unused = ["format", *ROW_OPTIONS, "source_tokenizer"]
    if recipe.reads_mds:
        unused.remove("source_tokenizer")
        if not recipe.source_tokenizer:
            unused.remove("text_field")
    elif recipe.document == "row":
        unused = ["source_tokenizer"]
    for item in fields(Recipe):
        flag = f"--{item.name.replace('_', '-')}"
        value = check_value(flag, item.type, getattr(recipe, item.name))
        if item.name in unused and value != item.default:
            raise ValueError(f"{flag} would be ignored with this source; leave it out")


class MDSRows(TokenizedTexts):
    """Rows of MDS shards as documents in `tokenizer`'s tokens.

    Token ids are decoded by `source_tokenizer`, without its special tokens, and encoded anew,
    unless both are the same tokenizer. Raises ValueError if the mosaicml-streaming package is
    missing, if rows are token ids but there is no source tokenizer, or if a row has neither text
    nor ids or is not UTF-8.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        name = recipe.source_tokenizer
        self.source_tokenizer = load_tokenizer(name) if name else None
        self.column = "input_ids" if name else recipe.text_field
        self.folder = Path(recipe.source).expanduser()
        self.rows = _library().LocalDataset(str(self.folder))
        infos = [info for shard in self.rows.shards for info, _ in shard.file_pairs]
        names = [INDEX, *(info.basename for info in infos)]
        states = file_states(self.folder / name for name in names)
        super().__init__(LazyTexts((), str, states), tokenizer, add_bos=recipe.add_bos)
        columns = self.rows.shards[0].column_names
        if self.column not in columns:
            raise ValueError(
                f"{recipe.source} has the columns {', '.join(sorted(columns))}; write --text-field "
                "with one that holds text, or for input_ids --source-tokenizer with the "
                "tokenizer.json that made them (Llama-3's for ProLong)"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def documents(self, row: int) -> Iterator[Encoded]:
        """Each document of a row, closed by the end-of-document token."""
        try:
            columns = self.rows[row]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.folder}, row {row + 1}: not UTF-8 ({error.reason})") from error
        if self.source_tokenizer is None:
            yield self.framed(self.tokenizer.encode(columns[self.column]))
            return
        ids = np.asarray(columns[self.column]).astype(np.int32).ravel()
        # [documents, 2]: [start, stop) of each; without indices, the row is one document.
        bounds = np.asarray(columns.get("indices", [[0, len(ids)]])).reshape(-1, 2)
        for start, stop in bounds.tolist():
            part = ids[start:stop]
            if self.source_tokenizer.digest != self.tokenizer.digest:
                part = self.tokenizer.encode(self.source_tokenizer.decode(part))
            yield self.framed(part)


def unpack(source: str) -> None:
    """Decompress all shards next to their compressed files. Call this once, before several
    processes read them."""
    streaming = _library()
    folder = Path(source).expanduser()
    compressed_files = folder.glob("*.mds.*")
    if all(path.with_suffix("").is_file() for path in compressed_files):
        return
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=1)
    for shard in range(len(dataset.shards)):
        dataset.prepare_shard(shard)


def _library() -> Any:
    try:
        import streaming
    except ImportError as error:
        raise ValueError(
            "MDS shards need the package mosaicml-streaming, which is missing or incomplete here "
            f"({error}); pip install --no-deps mosaicml-streaming, and what it imports"
        ) from error
    return streaming


def open_folder(source: str, whole: bool) -> LazyTexts:
    """Documents of all text files below `source`, joined in the order of their names, each after a
    line with its name.

    Each folder directly in `source` is a document, and the files directly in `source` are one more.
    With `whole`, everything is one document. Names that begin with a dot (.git), links, empty
    files, and files with a zero byte near their beginning (which are not text) are left out. Raises
    ValueError if there is no such folder or it has no such file.
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        raise ValueError(f"{source} is not a folder; with --document folder or source write one")
    files_by_document: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for path, problem in files_below(root, source, follow_links=False):
        problem = problem or _problem(path)
        if problem:
            left_out[problem] += 1
            continue
        name = path.relative_to(root).as_posix()
        folder, slash, _ = name.partition("/")
        files_by_document[folder if slash and not whole else ""].append((name, path))
    if left_out:
        logger.info("%s: these were not read: %s", root, in_words(left_out))
    if not files_by_document:
        raise ValueError(f"{source} holds no text files")
    documents = [files_by_document[document] for document in sorted(files_by_document)]
    paths = [path for files in documents for _, path in files]
    return LazyTexts(documents, join_files, file_states(paths))


def _problem(path: Path) -> str:
    """The reason why a file is not read, and its ending, such as "binary .png"; empty for text."""
    with path.open("rb") as file:
        beginning = file.read(8192)
    if not beginning:
        return f"empty {ending_of(path)}"
    return f"binary {ending_of(path)}" if b"\0" in beginning else ""
