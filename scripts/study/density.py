"""What patterns cost the real model: density, recall, kernel time, loss, and needles not found.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.density --model outputs/smollm2 --out density.json

Texts are code, prose and chat. Those longer than the model was trained at are read by YaRN. Of each
pattern, at each value of one of its parameters, is measured:

* density and recall on the queries and keys that dense attention has in each layer, against the
  exact softmax of all rows, and those of the best choices there are;
* on a GPU, kernel time: all layers' attention as one batch, forward + backward, the index given;
* the model with the pattern in all of its layers: cross entropy less that of dense attention, and
  the share of the answers' tokens that it finds for needles hidden in the text (--needles).

On a GPU attention is in bf16, on a CPU in fp32. OUT is written after each text; the same command
continues with those missing.
"""

import argparse
import functools
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import Attention, ours, ready_index, sdpa
from scripts.benchmarks.options import positive
from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.timing import times, training_call
from scripts.study.mass import (
    BLOCK,
    ORACLES,
    attention_mass,
    causal_mask,
    kept,
    prices,
    value_at,
)
from scripts.study.quality import RealModel, hide_needles, quality
from scripts.study.texts import KINDS, TEXTS_OF_KIND, Text, text_of
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer

AT_RECALLS = (0.8, 0.9, 0.95)
AT_DENSITIES = (0.05, 0.1, 0.15, 0.2)
SAME = ("layers", "patterns", "needles")
"""Options that all texts of a file share."""
_WARM_UPS = 2
_REPEATS = 3


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


def main(words: list[str]) -> int:
    args = parse(words)
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the program with status 2 for what cannot run here."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.density",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [spec.name for spec in SPECS]
    needles = 4 if torch.cuda.is_available() else 0
    add("--model", type=Path, required=True, help="folder of scripts.study.real_model")
    add("--out", type=Path, required=True, help="JSON file, written after each text")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--texts", type=int, choices=range(1, TEXTS_OF_KIND + 1), default=TEXTS_OF_KIND)
    add("--lengths", type=positive, nargs="+", default=[2048, 4096, 8192, 16384])
    add("--needles", type=int, default=needles, help="hidden in the text; 0 for none")
    add("--layers", type=int, nargs="+", help="whose queries and keys are looked at; default: all")
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
    all_layers = range(model.config.layers)
    if not set(args.layers or []) <= set(all_layers):
        raise ValueError(f"--layers: write numbers from 0 to {all_layers[-1]}")
    tokenizer = load_tokenizer(str(args.model))
    for length in args.lengths:
        for number in range(args.texts):
            for kind in args.kinds:
                name = f"{kind} {number}, {length} tokens"
                if name not in result["texts"]:
                    text = text_of(kind, number)
                    result["texts"][name] = measure_text(args, text, length, model, tokenizer)
                    write(result, args.out)
                    print(table(name, [result["texts"][name]]), flush=True)
        of_length = [text for text in result["texts"].values() if text["tokens"] == length]
        print(table(f"{length} tokens, mean of {len(of_length)} texts", of_length))


def started(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The result so far: what OUT holds, or only where it comes from.

    Raises ValueError if OUT was written with other layers, patterns or needles.
    """
    described = vars(args) | {"model": str(args.model), "out": str(args.out)}
    result = provenance(argparse.Namespace(**described), device) | {"texts": {}}
    if not args.out.is_file():
        return result
    found = json.loads(args.out.read_text(encoding="utf-8"))
    for key in SAME:
        if found["options"].get(key) != described[key]:
            raise ValueError(f"{args.out} was written with other --{key}; write another --out")
    return result | {"texts": found["texts"]}


def write(result: dict[str, Any], out: Path) -> None:
    """As JSON, by a rename, so that the file is always whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.rename(out)


def measure_text(
    args: argparse.Namespace, text: Text, length: int, model: RealModel, tokenizer: Tokenizer
) -> dict[str, Any]:
    """All that is measured on the first `length` tokens of a text, and what is read off."""
    specs = [spec for spec in SPECS if spec.name in args.patterns]
    tokens = text.tokens(tokenizer, length)
    # First, so that a needle that does not fit is refused at once.
    needles = hide_needles(text, tokenizer, length, args.needles)
    q, k = model.queries_and_keys(tokens, args.layers or list(range(model.config.layers)))
    measured = measure(q, k, specs)
    dense = quality(model, tokens, needles, Dense())
    patterns = [pattern for spec in specs for pattern in spec.patterns()]
    for row, pattern in zip(measured["rows"], patterns, strict=True):
        row["in_all_layers"] = found = quality(model, tokens, needles, pattern)
        found["above_dense"] = round(found["loss"] - dense["loss"], 5)
    return {
        "kind": text.kind,
        "source": text.source,
        "sha256": hashlib.sha256(text.content.encode()).hexdigest(),
        "tokens": length,
        "yarn_factor": max(1.0, length / model.config.max_positions),
        "dtype": str(model.dtype).removeprefix("torch."),
        "dense": dense,
        **measured,
        "at_recall": at_recall(measured),
        "at_density": at_density(measured["rows"]),
    }


def measure(q: Tensor, k: Tensor, specs: list[Spec]) -> dict[str, Any]:
    """Rows of patterns, points of the best choices, and on a GPU times.

    q: [layers, Hq, S, D], k: [layers, Hkv, S, D].
    """
    mask = causal_mask(q.shape[2], q.device)
    rows: list[dict[str, Any]] = []
    chosen: list[tuple[Pattern, BlockIndex]] = []
    for spec in specs:
        for value, pattern in zip(spec.values, spec.patterns(), strict=True):
            rows.append({"name": spec.name, "knob": spec.knob, "value": value})
            # Layers are the batch.
            chosen.append((pattern, pattern.select(q, k, mask, block_size=BLOCK)))
    at = prices(q.shape[2])
    best = [{"name": name} for name in ORACLES for _ in at]
    # (recall, density) by layer, of each row and of each best choice.
    of_rows: list[list[tuple[float, float]]] = [[] for _ in rows]
    of_best: list[list[tuple[float, float]]] = [[] for _ in best]
    for layer, (layer_q, layer_k) in enumerate(zip(q, k)):
        mass = attention_mass(layer_q, layer_k)
        for points, (pattern, index) in zip(of_rows, chosen, strict=True):
            recall, density = kept(_of_layer(pattern, index, layer), mass)
            points.append((recall.mean().item(), density.mean().item()))
        curves = [oracle(layer_q, layer_k, mass, at) for oracle in ORACLES.values()]
        for points, point in zip(of_best, itertools.chain(*curves), strict=True):
            points.append(point)
    for row, points in zip([*rows, *best], [*of_rows, *of_best], strict=True):
        row |= _means(torch.tensor(points, dtype=torch.float64))
    measured: dict[str, Any] = {"rows": rows, "oracles": best}
    if q.is_cuda:
        tensors = _draw(q, k)
        measured["dense_ms"] = dense_times(tensors)
        for row, (pattern, index) in zip(rows, chosen, strict=True):
            row["selection_ms"] = selection_time(pattern, q, k)
            ready = ready_index(pattern, index.tensors())
            call = functools.partial(ours, "triton", ready, mask, BLOCK)
            row["kernel_ms"] = {"triton": training_times(call, tensors)}
    return measured


def _of_layer(pattern: Pattern, index: BlockIndex, layer: int) -> BlockIndex:
    """What a pattern chose in one layer; layers are the batch of its index."""
    tensors = [tensor[layer : layer + 1] for tensor in index.tensors()]
    mask = causal_mask(index.seq_len, index.verticals.device)
    return pattern.index(tensors, mask, 1, index.heads, BLOCK)


def _means(points: Tensor) -> dict[str, Any]:
    """points: recall and density by layer, fp64 [layers, 2]."""
    recall, density = points.mean(0).tolist()
    return {
        "recall": round(recall, 5),
        "density": round(density, 5),
        "recall_by_layer": [round(value, 4) for value in points[:, 0].tolist()],
        "density_by_layer": [round(value, 4) for value in points[:, 1].tolist()],
    }


def _draw(q: Tensor, k: Tensor) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient. v may be random for times."""
    torch.manual_seed(0)
    leaves = [q.detach().clone(), k.detach().clone(), torch.randn_like(k)]
    for leaf in leaves:
        leaf.requires_grad_()
    return [*leaves, torch.randn_like(q)]


def dense_times(tensors: list[Tensor]) -> dict[str, dict[str, float]]:
    """Of torch's SDPA on cuDNN, and of ours without a pattern."""
    mask = causal_mask(tensors[0].shape[2], tensors[0].device)
    calls: dict[str, Attention] = {
        "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "ours, triton": functools.partial(ours, "triton", Dense(), mask, BLOCK),
    }
    return {name: training_times(call, tensors) for name, call in calls.items()}


def training_times(call: Attention, tensors: list[Tensor]) -> dict[str, float]:
    """Median milliseconds. tensors: of _draw()."""
    steps = training_call(call, tensors[:3], tensors[3])
    times(steps, _WARM_UPS, lead=False)
    forward_ms, backward_ms = times(steps, _REPEATS, lead=True)
    return {"forward_ms": round(forward_ms, 3), "backward_ms": round(backward_ms, 3)}


def selection_time(pattern: Pattern, q: Tensor, k: Tensor) -> float:
    """Median milliseconds of choosing for all layers."""
    mask = causal_mask(q.shape[2], q.device)
    step = functools.partial(pattern.select, q, k, mask, block_size=BLOCK)
    times([step], _WARM_UPS, lead=False)
    return round(times([step], _REPEATS, lead=True)[0], 3)


def at_recall(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Density, and on a GPU milliseconds, of each best choice and pattern at each of AT_RECALLS.

    None where nothing kept so much.
    """
    rows = []
    for name, points in _curves([*measured["oracles"], *measured["rows"]]).items():
        recalls = [point["recall"] for point in points]
        columns = {"density": [point["density"] for point in points]}
        if "kernel_ms" in points[0]:
            columns["selection_ms"] = [point["selection_ms"] for point in points]
            spent = [sum(point["kernel_ms"]["triton"].values()) for point in points]
            columns["kernel_ms"] = spent
        for recall in AT_RECALLS:
            row: dict[str, Any] = {"name": name, "at_recall": recall}
            for key, values in columns.items():
                row[key] = _rounded(value_at(recall, recalls, values))
            if "kernel_ms" in row:
                row["kernel_ms"] = {"triton": row["kernel_ms"]}
            rows.append(row)
    return rows


def at_density(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss above dense and needles of each pattern that may compute each of AT_DENSITIES.

    Of the densest setting where all compute less. None where all compute more. Densities are those
    of the forward with the pattern in all layers.
    """
    rows = []
    for name, points in _curves(measured).items():
        found = [point["in_all_layers"] for point in points]
        negative = [-quality["density"] for quality in found]
        for density in AT_DENSITIES:
            row: dict[str, Any] = {"name": name, "at_density": density}
            for key in ("above_dense", "needles"):
                if key in found[0]:
                    values = [quality[key] for quality in found]
                    row[key] = _rounded(value_at(-density, negative, values))
            rows.append(row)
    return rows


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each best choice and pattern."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        curves.setdefault(row["name"], []).append(row)
    return curves


def table(title: str, texts: list[dict[str, Any]]) -> str:
    """Means over texts, at equal recall and at equal density. A dash: missing in some texts."""
    lines = [f"| {title} | at | density or loss above dense | ms or needles |", "|---|---|---|---|"]
    for key, first, second in (
        ("at_recall", "density", "kernel_ms"),
        ("at_density", "above_dense", "needles"),
    ):
        by_text = [{(row["name"], row[key]): row for row in text[key]} for text in texts]
        for name, at in by_text[0]:
            found = [rows.get((name, at), {}) for rows in by_text]
            cells = [_mean([row.get(column) for row in found]) for column in (first, second)]
            lines.append(f"| {name} | {key[3:]} {at} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _mean(values: list[Any]) -> str:
    known = [value["triton"] if isinstance(value, dict) else value for value in values]
    if any(value is None for value in known):
        return "-"
    return f"{sum(known) / len(known):.4f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
