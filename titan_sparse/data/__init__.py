"""Text -> tokens -> documents -> packed sequences with document boundaries; a resumable loader."""

from titan_sparse.options.extras import need_here

need_here("train")

from titan_sparse.data.documents import open_source
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Batch", "PackedLoader", "Tokenizer", "build_loader", "open_tokenizer", "open_source"]
