"""What patterns cost the real model: density, recall, kernel time, loss, and needles not found.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.density --model outputs/smollm2 --out density.json

Texts are code, prose and chat. Those longer than the model was trained at are read by YaRN. Of each
pattern, at each value of one of its parameters, is measured:

* density and recall on the queries and keys that dense attention has in each layer. What is kept is
  weighed against the exact softmax of all rows, beside the best choices there are.
* kernel time, on a GPU: all layers' attention as one batch, forward + backward, the index given.
* what the model says with the pattern in all of its layers, whatever --layers are: the mean cross
  entropy over the text, less that of dense attention; density and recall of that forward; and the
  share of the answers' tokens that it finds for needles hidden in the text (--needles).

Tables show density and time at equal recall, then loss and needles at equal density. On a GPU
attention is in bf16, on a CPU in fp32. OUT is written after each text; the same command goes on
with those missing.
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
from scripts.study.density.quality import hide_needles, measure_quality
from scripts.study.density.report import (
    TIMED_RECALLS,
    asked_and_kept,
    at_density,
    at_recall,
    dense_lines,
    means,
    means_at_density,
    quality_table,
    table,
)
from scripts.study.density.texts import KINDS, TEXTS_OF_KIND, Text, text_of
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer

PROGRAM = "scripts.study.density"
SAME = ("layers", "patterns", "also", "needles")
"""Options that all texts of a file share."""
TIMED = "lengths at which times are measured too, on a GPU"
NEEDLES = (
    "answers asked for in prompts of the text's length, each about a needle at its own depth, with "
    "each pattern in all layers; 0 for none; default: 4 on a GPU, 0 on a CPU"
)
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
    add("--needles", type=int, default=4 if cuda else 0, metavar="N", help=NEEDLES)
    add("--layers", type=int, nargs="+", help="whose queries and keys are looked at; default: all")
    add("--patterns", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    add("--also", nargs="+", action="append", default=[], metavar="WORD", help=ALSO)
    args = parser.parse_args(words)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; write the folder of real_model")
    if any(length % BLOCK for length in args.lengths):
        parser.error(f"--lengths: write multiples of {BLOCK}")
    if args.needles < 0:
        parser.error(f"--needles {args.needles}: write 0 or more")
    if args.timed and not cuda:
        parser.error("--timed needs a CUDA GPU, and there is none here; leave it out")
    return args


def started(args: argparse.Namespace) -> dict[str, Any]:
    """The result so far: what OUT holds, or only where it comes from.

    Raises ValueError if OUT was written with other layers, patterns or needles.
    """
    described = vars(args) | {"model": str(args.model), "out": str(args.out)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = provenance(argparse.Namespace(**described), device) | {"texts": {}}
    if not args.out.is_file():
        return result
    found = json.loads(args.out.read_text(encoding="utf-8"))
    for key in SAME:
        # A file of a version without needles has no such option, and all its texts are done anew.
        if found["options"].get(key, described[key]) != described[key]:
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
    if not set(args.layers or []) <= set(all_layers):
        raise ValueError(f"--layers: write numbers from 0 to {all_layers[-1]}")
    tokenizer = load_tokenizer(str(args.model))
    for text, length in texts(args):
        name = f"{text.kind} {text.number}, {length} tokens"
        # An older version wrote texts without the model's own losses.
        if "at_density" in result["texts"].get(name, {}):
            print(f"{name}: is in {args.out}", flush=True)
            continue
        began = time.perf_counter()
        measured = measure_text(args, text, length, model, tokenizer, specs)
        about = {
            "commit": result["commit"],
            "kind": text.kind,
            "source": text.source,
            "sha256": text.sha256(),
            "tokens": length,
            "yarn_factor": max(1.0, length / model.config.max_positions),
            "dtype": str(dtype).removeprefix("torch."),
            "seconds": round(time.perf_counter() - began, 1),
        }
        result["texts"][name] = about | measured
        write(result, args.out)
        report_text(name, result["texts"][name])


def measure_text(
    args: argparse.Namespace,
    text: Text,
    length: int,
    model: RealModel,
    tokenizer: Tokenizer,
    specs: list[Spec],
) -> dict[str, Any]:
    """All that is measured on the first `length` tokens of a text, and what is read off."""
    tokens = text.tokens(tokenizer, length)
    # First, so that a needle that does not fit is told at once.
    needles = hide_needles(text, tokenizer, length, args.needles)
    inputs = model.inputs(tokens, args.layers or list(range(model.config.layers)))
    # One text of each kind, as times hardly depend on the text.
    timed = length in args.timed and text.number == 0
    measured = measure(inputs, specs, Timing(TIMED_RECALLS, args.repeats) if timed else None)
    dense, of_settings = measure_quality(model, tokens, needles, specs)
    for row, in_all_layers in zip(measured["rows"], of_settings, strict=True):
        row["in_all_layers"] = in_all_layers
    return {
        "cross_entropy": round(inputs.cross_entropy, 4),
        "dense": dense,
        **measured,
        "at_recall": list(at_recall(measured)),
        "at_density": list(at_density(measured)),
    }


def report_text(name: str, text: dict[str, Any]) -> None:
    """Print what was measured on one text."""
    title = f"{name}, {text['cross_entropy']} nats a token, {text['seconds']} s"
    print(table(title, text["at_recall"]))
    for lines in (asked_and_kept(text), dense_lines(text)):
        if lines:
            print(lines)
    dense = text["dense"]
    title = f"{name}, dense attention {dense['loss']:.4f} nats a token"
    if "needles" in dense:
        title += f", {dense['needles']:.1%} of the needles' tokens"
    print(quality_table(title, text["at_density"]), flush=True)


def report_means(result: dict[str, Any]) -> None:
    """Print tables for each length, the mean over its texts."""
    by_length: dict[int, list[dict[str, Any]]] = {}
    for text in result["texts"].values():
        by_length.setdefault(text["tokens"], []).append(text)
    for length, of_length in sorted(by_length.items()):
        title = f"{length} tokens, mean of {len(of_length)} texts"
        print(table(title, means(of_length)))
        rows = means_at_density(of_length)
        if rows:
            print(quality_table(title, rows))


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


def setting(word: str) -> tuple[str, bool | int | float | str]:
    """A parameter of a pattern: "sinks=4" -> ("sinks", 4), "count_sinks=false" -> (.., False)."""
    key, _, value = word.partition("=")
    if value in ("true", "false"):
        return key, value == "true"
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
