"""Density, recall and kernel time of patterns on the real model, beside the best choices there are.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.density --model outputs/smollm2 --out density.json

Queries and keys of all layers, on code, prose and chat. What a pattern keeps is weighed against the
exact softmax of all rows. Texts longer than the model was trained at are read by YaRN. On a GPU in
bf16, with times of all layers' attention as one batch, forward + backward with the index given; on
a CPU in fp32, without. OUT is written after each text; the same command goes on with those missing.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.options import positive
from scripts.benchmarks.provenance import provenance
from scripts.study.density.inputs import RealModel
from scripts.study.density.mass import BLOCK
from scripts.study.density.measure import Timing, measure
from scripts.study.density.patterns import SPECS, Spec
from scripts.study.density.report import (
    TIMED_RECALLS,
    asked_and_kept,
    at_recall,
    dense_lines,
    means,
    table,
)
from scripts.study.density.texts import KINDS, TEXTS_OF_KIND, Text, text_of
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.data.tokenizer import load_tokenizer

PROGRAM = "scripts.study.density"
SAME = ("layers", "patterns", "also")
"""Options that all texts of a file share."""
TIMED = "lengths at which times are measured too, on a GPU"
ALSO = "one more variant of VerticalSlash: its name, then parameters as sinks=4 budget=joint"


def main(words: list[str]) -> int:
    args = parse(words)
    try:
        result = started(args)
        run(args, result)
        report_means(result)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The command line. Ends the program with status 2 for what cannot run here."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [spec.name for spec in SPECS]
    cuda = torch.cuda.is_available()
    add("--model", type=Path, required=True, help="folder of scripts.study.real_model")
    add("--out", type=Path, required=True, help="JSON file, written after each text")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--texts", type=int, choices=range(1, TEXTS_OF_KIND + 1), default=TEXTS_OF_KIND)
    add("--lengths", type=positive, nargs="+", default=[2048, 4096, 8192, 16384])
    add("--timed", type=int, nargs="*", default=[8192, 16384] if cuda else [], help=TIMED)
    add("--repeats", type=positive, default=3, help="timed calls; the median counts")
    add("--layers", type=int, nargs="+", help="default: all")
    add("--patterns", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    add("--also", nargs="+", action="append", default=[], metavar="WORD", help=ALSO)
    args = parser.parse_args(words)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; write the folder of real_model")
    if any(length % BLOCK for length in args.lengths):
        parser.error(f"--lengths: write multiples of {BLOCK}")
    if args.timed and not cuda:
        parser.error("--timed needs a CUDA GPU, and there is none here; leave it out")
    return args


def started(args: argparse.Namespace) -> dict[str, Any]:
    """The result so far: what OUT holds, or only where it comes from.

    Raises ValueError if OUT was written with other layers or patterns.
    """
    described = vars(args) | {"model": str(args.model), "out": str(args.out)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = provenance(argparse.Namespace(**described), device) | {"texts": {}}
    if not args.out.is_file():
        return result
    found = json.loads(args.out.read_text(encoding="utf-8"))
    for key in SAME:
        if found["options"][key] != described[key]:
            raise ValueError(f"{args.out} was written with other --{key}; write another --out")
    return result | {"texts": found["texts"]}


def run(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure the texts that `result` lacks, and write OUT after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # As attention sees them in training; a CPU is slow in bf16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    specs = chosen_specs(args)
    model = RealModel(args.model, device, dtype)
    all_layers = range(model.config.layers)
    layers = args.layers or list(all_layers)
    if not set(layers) <= set(all_layers):
        raise ValueError(f"--layers: write numbers from 0 to {all_layers[-1]}")
    tokenizer = load_tokenizer(str(args.model))
    for text, length in texts(args):
        name = f"{text.kind} {text.number}, {length} tokens"
        if name in result["texts"]:
            print(f"{name}: is in {args.out}", flush=True)
            continue
        began = time.perf_counter()
        inputs = model.inputs(text.tokens(tokenizer, length), layers)
        # One text of each kind, as times hardly depend on the text.
        timed = length in args.timed and text.number == 0
        measured = measure(inputs, specs, Timing(TIMED_RECALLS, args.repeats) if timed else None)
        about = {
            "commit": result["commit"],
            "kind": text.kind,
            "source": text.source,
            "sha256": text.sha256(),
            "tokens": length,
            "yarn_factor": max(1.0, length / model.config.max_positions),
            "dtype": str(dtype).removeprefix("torch."),
            "cross_entropy": round(inputs.cross_entropy, 4),
            "seconds": round(time.perf_counter() - began, 1),
        }
        rows = list(at_recall(measured))
        result["texts"][name] = about | measured | {"at_recall": rows}
        write(result, args.out)
        title = f"{name}, {about['cross_entropy']} nats a token, {about['seconds']} s"
        print(table(title, rows), flush=True)
        for lines in (asked_and_kept(measured), dense_lines(measured)):
            if lines:
                print(lines, flush=True)


def report_means(result: dict[str, Any]) -> None:
    """Print a table for each length, the mean over its texts."""
    by_length: dict[int, list[dict[str, Any]]] = {}
    for text in result["texts"].values():
        by_length.setdefault(text["tokens"], []).append(text)
    for length, of_length in sorted(by_length.items()):
        title = f"{length} tokens, mean of {len(of_length)} texts"
        print(table(title, means(of_length)))


def chosen_specs(args: argparse.Namespace) -> list[Spec]:
    """Those of --patterns, then those of --also. Raises ValueError for what is no pattern."""
    specs = [spec for spec in SPECS if spec.name in args.patterns]
    known = [spec.name for spec in SPECS]
    for name, *words in args.also:
        if name in known:
            raise ValueError(f"--also {name} is in the table; write another name")
        spec = Spec(name, VerticalSlash, dict(setting(word) for word in words))
        try:
            spec.pattern(spec.values[0])
        except TypeError as error:
            raise ValueError(f"--also {name}: {error}") from None
        specs.append(spec)
    return specs


def setting(word: str) -> tuple[str, int | float | str]:
    """A parameter of a pattern: "sinks=4" -> ("sinks", 4)."""
    key, _, value = word.partition("=")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            pass
    return key, value


def texts(args: argparse.Namespace) -> Iterator[tuple[Text, int]]:
    """Texts and lengths, the first text of every kind first."""
    for length in dict.fromkeys(args.lengths):
        for number in range(args.texts):
            for kind in args.kinds:
                yield text_of(kind, number), length


def write(result: dict[str, Any], out: Path) -> None:
    """As JSON, by a rename, so that the file is always whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.rename(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
