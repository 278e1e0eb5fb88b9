"""Documents of tokens: from texts that are tokenized when first needed, or from prepared shards."""

import logging
from collections.abc import Iterator

import numpy as np

from titan_sparse.config.sections import Data
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.shards import TokenShards, is_prepared
from titan_sparse.data.sources import LazyTexts, open_source
from titan_sparse.data.tokenizer import Encoded, SampleFormat, Tokenizer, closed

logger = logging.getLogger("titan_sparse")


MOST_KEPT = 1 << 24
"""Tokens of texts that stay in memory, so that a document that continues is not read again."""


class TokenizedTexts:
    """Documents of a source. They are tokenized when they, or their lengths, are asked for.

    With an `encoder`, the texts of the source are samples of chats. Lengths are kept in memory, and
    so are MOST_KEPT tokens. Lengths and tokens include the end-of-document token.
    """

    total_tokens = 0
    """of all documents; 0, because they are not known before reading them"""

    def __init__(
        self,
        source: LazyTexts | list[str],
        tokenizer: Tokenizer,
        encoder: ChatEncoder | None = None,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.sample_format = encoder.sample_format if encoder else SampleFormat()
        # Lengths include the end-of-document token, so 0 means "not known yet".
        self._lengths = np.zeros(len(source), dtype=np.int64)
        # The documents read last, the oldest first.
        self._encoded: dict[int, Encoded] = {}
        self._kept = 0

    def __len__(self) -> int:
        return len(self.source)

    def length(self, index: int) -> int:
        if self._lengths[index] == 0:
            self._lengths[index] = len(self[index].tokens)
        return int(self._lengths[index])

    def __getitem__(self, index: int) -> Encoded:
        if index not in self._encoded:
            known = set(self.encoder.skipped) if self.encoder else set()
            (document,) = self.documents(index)
            for reason in self.encoder.skipped.keys() - known if self.encoder else ():
                logger.warning('data.bad_rows = "skip": chats are skipped: %s', reason)
            self._encoded[index] = document
            self._kept += len(document.tokens)
            while self._kept > MOST_KEPT and len(self._encoded) > 1:
                self._kept -= len(self._encoded.pop(next(iter(self._encoded))).tokens)
        return self._encoded[index]

    def raw(self, index: int) -> bytes:
        """A document as it is on disk, before it is tokenized."""
        return self.source[index].encode("utf-8", "surrogatepass")

    def documents(self, row: int) -> Iterator[Encoded]:
        """The document of a row, for prepare_data."""
        text = self.source[row]
        if self.encoder:
            yield self.encoder.encode(text)
        else:
            yield closed(self.tokenizer.encode(text), self.tokenizer.end_of_document)


Documents = TokenizedTexts | TokenShards
"""What a stream cuts into sequences."""

ROW_OPTIONS = (
    "text_field",
    "messages_field",
    "loss_on",
    "chat_template",
    "chat_template_kwargs",
    "subset",
    "split",
    "bad_rows",
)
"""Keys of [data], and of prepare_data, that say how rows are read."""


def open_documents(data: Data, tokenizer: Tokenizer, model_folder: str = "") -> Documents:
    """Open one part of data.source, whose format is data.format.

    model_folder: model.initial_hf, for its chat template. Raises ValueError, naming the key, if the
    part cannot be opened or an option would be ignored.
    """
    if is_prepared(data.source):
        # prepare_data has already applied these.
        for name in ("format", *ROW_OPTIONS, "split_special_tokens"):
            if getattr(data, name) != getattr(Data(), name):
                raise ValueError(
                    f"data.{name} would be ignored with the prepared tokens of "
                    f'data.source = "{data.source}"; leave it out'
                )
        return TokenShards(data.source, tokenizer)
    if data.format == "text":
        return TokenizedTexts(open_source(data), tokenizer)
    encoder = ChatEncoder(data, tokenizer, model_folder)
    if encoder.notice:
        logger.warning("%s: %s", data.source, encoder.notice)
    return TokenizedTexts(open_source(data), tokenizer, encoder)
