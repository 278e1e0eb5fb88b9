"""MDS shards (mosaicml-streaming), the format in which ProLong's data are released.

A row holds text, or the token ids of some tokenizer as `input_ids`. Where several documents share a
row, `indices` holds their [start, stop). (ProLong, princeton-nlp/prolong-data-512K, holds Llama-3
tokens.)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.formats import Encoded, closed
from titan_sparse.data.tokenizer import Tokenizer


def is_mds(source: str) -> bool:
    """Whether `source` is a folder of MDS shards."""
    return (Path(source).expanduser() / "index.json").is_file()


class MDSRows:
    """Rows of MDS shards as documents in `tokenizer`'s tokens.

    Token ids are decoded by `source_tokenizer`, without its special tokens, and encoded anew. If
    both are the same tokenizer, the ids are taken as they are. Raises ValueError without the
    mosaicml-streaming package, without a source tokenizer where rows are token ids, or if a row has
    neither text nor ids or is no UTF-8.
    """

    def __init__(
        self, source: str, text_field: str, tokenizer: Tokenizer, source_tokenizer: Tokenizer | None
    ) -> None:
        self.source = source
        self.text_field = text_field
        self.tokenizer = tokenizer
        self.source_tokenizer = source_tokenizer
        self.rows = _open(str(Path(source).expanduser()))
        columns = set(self.rows.shards[0].column_names)
        if text_field not in columns and "input_ids" not in columns:
            raise ValueError(
                f"{source} has neither the column {text_field} (--text-field) nor input_ids; "
                f"write one of: {', '.join(sorted(columns))}"
            )
        if text_field not in columns and source_tokenizer is None:
            raise ValueError(
                f"{source} holds token ids; write --source-tokenizer with the tokenizer.json that "
                "made them (Llama-3's for ProLong)"
            )
        if text_field in columns and source_tokenizer is not None:
            raise ValueError(
                f"--source-tokenizer would be ignored, as {source} holds text in the column "
                f"{text_field}; leave it out"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def documents(self, row: int) -> Iterator[Encoded]:
        """Each document of a row, closed by the end-of-document token."""
        for ids in self._ids(row):
            yield closed(ids, self.tokenizer.end_of_document)

    def _ids(self, row: int) -> Iterator[NDArray[np.int32]]:
        """Tokens of each document of a row, int32 [length], without the end-of-document token."""
        try:
            columns = self.rows[row]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.source}, row {row + 1}: no UTF-8 ({error.reason})") from error
        if self.text_field in columns:
            yield self.tokenizer.encode(columns[self.text_field])
            return
        ids = np.asarray(columns["input_ids"]).astype(np.int32).ravel()
        # [documents, 2]: [start, stop) of each; without indices, the row is one document.
        bounds = np.asarray(columns.get("indices", [[0, len(ids)]])).reshape(-1, 2)
        for start, stop in bounds.tolist():
            yield self._convert(ids[start:stop])

    def _convert(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        source = self.source_tokenizer
        if source.digest != self.tokenizer.digest:
            return self.tokenizer.encode(source.decode(ids))
        # documents() closes them.
        if len(ids) and ids[-1] == source.end_of_document:
            return ids[:-1]
        return ids


def unpack(source: str) -> None:
    """Decompress all shards beside their compressed files; once, before several processes read
    them.

    Raises ValueError without the mosaicml-streaming package.
    """
    streaming = _library()
    folder = Path(source).expanduser()
    compressed_files = folder.glob("*.mds.*")
    if all(path.with_suffix("").is_file() for path in compressed_files):
        return
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=1)
    for shard in range(len(dataset.shards)):
        dataset.prepare_shard(shard)


def _open(folder: str) -> Any:
    return _library().LocalDataset(folder)


def _library() -> Any:
    try:
        import streaming
    except ImportError as error:
        raise ValueError(
            "MDS shards need the package mosaicml-streaming, which is missing or incomplete here "
            f'({error}); pip install "titan-sparse[mds]", in an environment of its own'
        ) from error
    return streaming
