"""The steps of titan-sparse choose at several lengths, in one result file.

    python -m scripts.benchmarks.sparse_pays --model FOLDER --lengths 4k,8k,16k,32k,64k \\
        --original-length 8192 --out benchmarks/results/sparse_pays_h100.json \\
        --data.source TEXTS --compile.enable

`python -m scripts.docs.numbers` then writes the table of docs/masks_and_patterns.md. Documents are
selected in at every length (dense_below is the least that is accepted). Other words are options of
titan-sparse choose.
"""

import argparse
import json
import sys
from pathlib import Path

from scripts.benchmarks.options import parser_of, positive
from scripts.benchmarks.provenance import provenance
from titan_sparse.commands.choose import configurations, measured, words_of_runs
from titan_sparse.config import Config
from titan_sparse.config.reading import lengths_of
from titan_sparse.training.faults.process_groups import choose_device


def main(words: list[str]) -> int:
    args, rest = parse(words)
    try:
        options = words_of_runs(args.model, args.batches, rest)
        result = {"rows": []}
        for length in lengths_of(args.lengths, "--lengths"):
            scaled = [*options, *scaling(length, args.original_length)]
            folder = Path("outputs/sparse_pays", str(length))
            configs = configurations(scaled, length, folder)
            result = about(args, configs["dense"]) | {
                "rows": result["rows"] + rows(length, configs)
            }
            # After each length: a longer one may not fit.
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("scripts.benchmarks.sparse_pays", __doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--lengths", default="4k,8k,16k,32k,64k", help="tokens, with commas")
    parser.add_argument(
        "--original-length", type=positive, default=8192, help="of the model; YaRN extends it"
    )
    parser.add_argument("--batches", type=positive, default=3)
    parser.add_argument("--out", required=True, help="JSON file to write")
    return parser.parse_known_args(words)


def scaling(length: int, original: int) -> list[str]:
    """The options that extend a model of `original` tokens."""
    if length <= original:
        return []
    return [
        "--model.rope_scaling=yarn",
        f"--model.rope_factor={length / original:g}",
        f"--model.rope_original_length={original}",
    ]


def about(args: argparse.Namespace, config: Config) -> dict:
    """The origin of the rows. choose writes its runs elsewhere."""
    return provenance(args, choose_device(config.training.device))


def rows(length: int, configs: dict[str, Config]) -> list[dict]:
    """A row for each setting, dense first, as in choose_h200.json."""
    found = []
    for name, config in configs.items():
        slash = config.attention.vertical_slash
        slash.dense_below = max(config.attention.block_size, slash.probe)
        row = measured(f"{name}, {length} tokens", config)
        losses = (row["loss"], found[0]["loss"] if found else row["loss"])
        about_loss = {"loss": losses[0], "above_dense": losses[0] - losses[1]}
        found.append({"tokens": length, "setting": name, **row, **about_loss})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
