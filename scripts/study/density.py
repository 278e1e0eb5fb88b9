"""Measure what patterns cost the real model: density, recall, kernel time, loss, and needles not
found.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.density --model outputs/smollm2 --out density.json

Texts are code, prose and chat. Those longer than the model was trained at are read by YaRN. Of each
pattern, at each value of one of its parameters, is measured:

* density and recall, of all rows, on the queries and keys that dense attention has in each layer;
* the model with the pattern in all of its layers: cross entropy less that of dense attention, and
  the share of the answers' tokens that it finds for needles hidden in the text (--needles).

On a GPU attention is in bf16, on a CPU in fp32. OUT is written after each text; the same command
continues with those missing.
"""

import argparse
import hashlib
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.benchmarks.provenance import provenance
from scripts.study.quality import (
    BLOCK,
    KINDS,
    TEXTS_OF_KIND,
    RealModel,
    Text,
    attend_and_compare,
    attend_by,
    hide_needles,
    quality,
    text_of,
)
from scripts.study.settings import read_json
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.commands import parser_of, positive, refuses
from titan_sparse.data.shards import write_json
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer

SAME = ("patterns", "needles")
"""Options that all texts of a file share."""


class Spec(NamedTuple):
    """A pattern of parameters `fixed`, with `knob` at each of `values`."""

    name: str
    kind: type[Pattern]
    fixed: dict[str, Any]
    knob: str = "recall"
    values: tuple[float, ...] = (0.3, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98)

    def patterns(self) -> list[Pattern]:
        """At each value of its knob."""
        return [self.kind(**self.fixed, **{self.knob: value}) for value in self.values]


_JOINT: dict[str, Any] = {"budget": "joint", "sinks": 4, "count_sinks": True}
_SPREAD = _JOINT | {"probe_rows": "spread"}
_PUBLISHED = {"sinks": 30, "local_slashes": 2, "probe_rows": "last", "count_sinks": True}
_THRESHOLDS = (0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 0.995)
DEFAULT = "joint, behind sinks, both"
SPECS = (
    Spec("joint, spread, sinks 4, local 1", VerticalSlash, _SPREAD | {"local_slashes": 1}),
    Spec("joint, spread, sinks 4, local 2", VerticalSlash, _SPREAD | {"local_slashes": 2}),
    Spec(
        "joint, behind sinks, local 2",
        VerticalSlash,
        _SPREAD | {"local_slashes": 2, "count_sinks": False},
    ),
    Spec(DEFAULT, VerticalSlash, {}),
    Spec("independent", VerticalSlash, {"budget": "independent"} | _PUBLISHED),
    Spec("xattention, stride 16", XAttention, {"stride": 16}, "threshold", _THRESHOLDS),
    Spec("moba, chunk 128", MoBA, {"chunk_size": 128}, "top_k", (2, 4, 8, 16, 32, 64, 96)),
)
"""The patterns that are compared: add yours here."""


@refuses
def main(words: list[str]) -> int:
    run(parse(words))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the program with status 2 for what cannot run here."""
    parser = parser_of(__doc__, "scripts.study.density")
    add = parser.add_argument
    names = [spec.name for spec in SPECS]
    needles = 4 if torch.cuda.is_available() else 0
    add("--model", type=Path, required=True, help="folder of scripts.study.real_model")
    add("--out", type=Path, required=True, help="JSON file, written after each text")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--texts", type=int, choices=range(1, TEXTS_OF_KIND + 1), default=TEXTS_OF_KIND)
    add("--lengths", type=positive, nargs="+", default=[2048, 4096, 8192, 16384])
    add("--needles", type=int, default=needles, help="hidden in the text; 0 for none")
    add("--patterns", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    args = parser.parse_args(words)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; write the folder of real_model")
    if any(length % BLOCK for length in args.lengths):
        parser.error(f"--lengths: write multiples of {BLOCK}")
    if args.needles < 0:
        parser.error(f"--needles {args.needles}: write 0 or more")
    return args


def run(args: argparse.Namespace) -> None:
    """Measure the texts that OUT lacks, write OUT after each, and print means over texts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # As attention sees them in training; a CPU is slow in bf16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result = started(args, device.type)
    model = RealModel(args.model, device, dtype)
    tokenizer = load_tokenizer(str(args.model))
    for length in args.lengths:
        for number in range(args.texts):
            for kind in args.kinds:
                name = f"{kind} {number}, {length} tokens"
                if name not in result["texts"]:
                    text = text_of(kind, number)
                    result["texts"][name] = measure_text(args, text, length, model, tokenizer)
                    write_json(args.out, result)
                    print(table(name, [result["texts"][name]]), flush=True)
        of_length = [text for text in result["texts"].values() if text["tokens"] == length]
        print(table(f"{length} tokens, mean of {len(of_length)} texts", of_length))


def started(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The result so far: what OUT holds, or only where it comes from.

    Raises ValueError if OUT was written with other patterns or needles.
    """
    described = vars(args) | {"model": str(args.model), "out": str(args.out)}
    result = provenance(argparse.Namespace(**described), device) | {"texts": {}}
    if not args.out.is_file():
        return result
    found = read_json(args.out)
    for key in SAME:
        if found["options"].get(key) != described[key]:
            raise ValueError(f"{args.out} was written with other --{key}; write another --out")
    return result | {"texts": found["texts"]}


def measure_text(
    args: argparse.Namespace, text: Text, length: int, model: RealModel, tokenizer: Tokenizer
) -> dict[str, Any]:
    """All that is measured on the first `length` tokens of a text, and what is read off."""
    specs = [spec for spec in SPECS if spec.name in args.patterns]
    tokens = text.tokens(tokenizer, length)
    # First, so that a needle that does not fit is refused at once.
    needles = hide_needles(text, tokenizer, length, args.needles)
    q, k = model.queries_and_keys(tokens)
    rows = measure(q, k, specs)
    dense = quality(model, tokens, needles, Dense())
    patterns = [pattern for spec in specs for pattern in spec.patterns()]
    for row, pattern in zip(rows, patterns, strict=True):
        row["in_all_layers"] = found = quality(model, tokens, needles, pattern)
        found["above_dense"] = round(found["loss"] - dense["loss"], 5)
    digest = hashlib.sha256(text.content.encode())
    return {
        "kind": text.kind,
        "source": text.source,
        "sha256": digest.hexdigest(),
        "tokens": length,
        "yarn_factor": max(1.0, length / model.config.max_positions),
        "dtype": str(model.dtype).removeprefix("torch."),
        "dense": dense,
        "rows": rows,
    }


def measure(q: Tensor, k: Tensor, specs: list[Spec]) -> list[dict[str, Any]]:
    """A row for each pattern. q: [layers, Hq, S, D], k: [layers, Hkv, S, D]."""
    patterns = [pattern for spec in specs for pattern in spec.patterns()]
    rows = [
        {"name": spec.name, "knob": spec.knob, "value": value}
        for spec in specs
        for value in spec.values
    ]
    # (recall, density) by layer, of each row.
    of_rows: list[list[tuple[float, float]]] = [[] for _ in rows]
    for layer_q, layer_k in zip(q, k):
        # What is attended to has no meaning here, so keys stand for values.
        qkv = (layer_q[None], layer_k[None], layer_k[None])
        _, dense = attend_by(Dense(), *qkv, q.dtype)
        for points, pattern in zip(of_rows, patterns, strict=True):
            _, *point = attend_and_compare(pattern, dense.lse, *qkv, q.dtype)
            points.append(tuple(point))
    for row, points in zip(rows, of_rows, strict=True):
        for name, by_layer in zip(("recall", "density"), zip(*points, strict=True), strict=True):
            row[name] = round(statistics.fmean(by_layer), 5)
            row[f"{name}_by_layer"] = [round(value, 4) for value in by_layer]
    return rows


def table(title: str, texts: list[dict[str, Any]]) -> str:
    columns = ["recall", "density", "loss above dense", "needles"]
    lines = [f"| {title} | at | {' | '.join(columns)} |", "|---" * 6 + "|"]
    for rows in zip(*(text["rows"] for text in texts), strict=True):
        measured = [row["in_all_layers"] | row for row in rows]
        cells = [rows[0]["name"], f"{rows[0]['value']:g}"]
        for key in ("recall", "density", "above_dense", "needles"):
            values = [one.get(key, math.nan) for one in measured]
            cells.append(f"{statistics.fmean(values):.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
