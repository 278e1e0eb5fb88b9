"""Times the loader alone: how many tokens a second one process hands out, with no model behind it.

    python -m scripts.benchmarks.loader --data.source PREPARED --training.seq_len 524288 \\
        [--seconds 10]

Other options are those of train.py. One process loads all sequences.
"""

import sys
import time

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config import Config, check, padding_multiple
from titan_sparse.config.reading import load_config
from titan_sparse.data import build_loader


def tokens_per_second(config: Config, seconds: float) -> float:
    """Tokens of sequences handed out in `seconds`.

    The first batch, which opens files and permutes, is not counted.
    """
    training = config.training
    loader = build_loader(
        config.data,
        training.seq_len,
        training.local_batch_size,
        training.seed,
        0,  # this process's rank of one
        1,
        padding_multiple(config),
        model_folder=config.model.initial_hf,
    )
    next(loader)
    tokens = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        lengths = next(loader).lengths  # of the documents of each sequence
        tokens += sum(sum(documents) for documents in lengths)
    return tokens / (time.perf_counter() - began)


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.benchmarks.loader")
    parser.add_argument("--seconds", type=float, default=10.0)
    args, rest = parser.parse_known_args(words)
    config = load_config(rest)
    check(config, 1, 1)
    rate = tokens_per_second(config, args.seconds)
    print(
        f"{config.data.source}, {config.data.sequences}, "
        f"{config.training.seq_len:,} tokens a sequence: {rate / 1e6:.1f} million tokens a second"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
