"""The steps of titan-sparse choose at several lengths, in one result file.

    python -m scripts.benchmarks.sparse_pays --model FOLDER --lengths 4k,8k,16k,32k,64k \\
        --original-length 8192 --out benchmarks/results/sparse_pays_h100.json \\
        --data.source TEXTS --compile.enable

`python -m scripts.docs.numbers` then writes the table of docs/masks_and_patterns.md. Documents are
selected in at every length (dense_below is the least that is accepted). Other words are options of
titan-sparse choose.
"""

import sys
from pathlib import Path

from scripts.benchmarks.provenance import provenance
from titan_sparse.commands import parser_of, positive, refuses
from titan_sparse.commands.choose import configurations, measured, words_of_runs
from titan_sparse.config import Config
from titan_sparse.config.reading import lengths_of
from titan_sparse.data.shards import write_json
from titan_sparse.training.faults.process_groups import choose_device


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.benchmarks.sparse_pays")
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--lengths", default="4k,8k,16k,32k,64k", help="tokens, with commas")
    add("--original-length", type=positive, default=8192, help="of the model; YaRN extends it")
    add("--batches", type=positive, default=3)
    add("--out", required=True, help="JSON file to write")
    args, rest = parser.parse_known_args(words)
    options = words_of_runs(args.model, args.batches, rest)
    found: list[dict] = []
    for length in lengths_of(args.lengths, "--lengths"):
        scaled = [*options, *scaling(length, args.original_length)]
        configs = configurations(scaled, length, Path("outputs/sparse_pays", str(length)))
        found += rows(length, configs)
        # After each length: a longer one may not fit. choose writes its runs elsewhere.
        origin = provenance(args, choose_device(configs["dense"].training.device))
        write_json(Path(args.out), origin | {"rows": found})
    print(f"wrote {args.out}")
    return 0


def scaling(length: int, original: int) -> list[str]:
    """The options that extend a model of `original` tokens."""
    if length <= original:
        return []
    return [
        "--model.rope_scaling=yarn",
        f"--model.rope_factor={length / original:g}",
        f"--model.rope_original_length={original}",
    ]


def rows(length: int, configs: dict[str, Config]) -> list[dict]:
    """A row for each setting, dense first, as in choose_h200.json."""
    found = []
    for name, config in configs.items():
        slash = config.attention.vertical_slash
        slash.dense_below = max(config.attention.block_size, slash.probe)
        row = measured(f"{name}, {length} tokens", config)
        of_dense = found[0]["loss"] if found else row["loss"]
        above = {"loss": row["loss"], "above_dense": row["loss"] - of_dense}
        found.append({"tokens": length, "setting": name, **row, **above})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
