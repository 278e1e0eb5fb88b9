"""Show samples as the model sees them, with what is learned.

    titan-sparse show_data --config X.toml [--samples 3] [--plain] [--key value ...]

Text that is learned is green, special tokens are bold, and the rest is dim. With --plain, for files
and terminals without colors, text that is learned is between ⟦ and ⟧. Each part of a mixture is
shown, without empty samples and those shorter than data.min_document_length. Other words are
options of the configuration, as train.py takes them.
"""

import logging
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from titan_sparse.commands import parser_of, positive, refuses
from titan_sparse.config import Flags, check, world_of
from titan_sparse.config.reading import load_config
from titan_sparse.config.sources import parts_of
from titan_sparse.data import Tokenizer, open_tokenizer
from titan_sparse.data.documents import open_documents

LEARNED = "\033[32m"
NOT_LEARNED = "\033[2m"
SPECIAL = "\033[1m"
RESET = "\033[0m"


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=positive, default=3, help="of each part of data.source")
    parser.add_argument("--plain", action="store_true", help="marks, not colors")
    args, rest = parser.parse_known_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    config = load_config(rest)
    # For as many ranks as it needs: the data are the same on any.
    check(config, *world_of(Flags(dry_run=True), config.parallelism, 1, 1))
    tokenizer = open_tokenizer(config)
    for part in parts_of(config.data):
        documents = open_documents(part, tokenizer, config.model.initial_hf)
        print(f"{part.source}: {len(documents):,} samples, {documents.sample_format.format}")
        samples = ((index, *documents[index]) for index in range(len(documents)))
        # The end-of-document token does not count.
        shortest = max(part.min_document_length, 1)
        long = (sample for sample in samples if len(sample[1]) > shortest)
        for index, tokens, learned in islice(long, args.samples):
            if learned is None:
                learned = np.ones(len(tokens), dtype=bool)
            print(f"\nsample {index + 1}: {len(tokens):,} tokens, {int(learned.sum()):,} learned")
            print(paint(tokens, learned, tokenizer, args.plain))
    return 0


def paint(
    tokens: NDArray[np.integer], learned: NDArray[np.bool_], tokenizer: Tokenizer, plain: bool
) -> str:
    """The text of a sample with marks or colors; tokens int [length], learned [length]."""
    is_special = np.isin(tokens, list(tokenizer.special_ids))
    looks = learned * 2 + (0 if plain else is_special)
    starts = np.flatnonzero(np.diff(looks, prepend=-1))
    parts = []
    for start, run in zip(starts, np.split(tokens, starts[1:]), strict=True):
        text = tokenizer.spell(run)
        if not plain:
            color = LEARNED if learned[start] else NOT_LEARNED
            bold = SPECIAL if is_special[start] else ""
            text = f"{color}{bold}{text}{RESET}"
        elif learned[start]:
            text = f"⟦{text}⟧"
        parts.append(text)
    return "".join(parts)
