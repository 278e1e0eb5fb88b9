"""What does sparse training cost in quality? MTraining's Figure 6a and Table 1 in small.

On one GPU (docs/study.md):

    python -m scripts.study --out outputs/study
        about an hour; --short: 20 minutes; --toy: a minute on a CPU
    python -m scripts.study --out outputs/study --list
        the parts, and the FLOPs of each
    python -m scripts.study --out outputs/study --part 3
        one part; with --minutes 9 as much as fits into nine minutes

Parts from 2 on can run at the same time, each on a GPU of its own by CUDA_VISIBLE_DEVICES.

A model of 0.1 B parameters is trained at 4K tokens on the Python files installed here, then
extended to 64K with YaRN by each method: same weights, data and order. What is there already is not
done again; a run that was stopped goes on. OUT/report has the results. Status 0: all parts that
were asked for are done; 3: stopped before the end, the same command goes on.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.study.clock import Clock, OutOfTime
from scripts.study.report import report
from scripts.study.runs import (
    PRETRAIN,
    SIZES,
    Size,
    cost,
    evaluations,
    is_done,
    methods,
)
from titan_sparse.config import ConfigError
from titan_sparse.config.reading import require
from titan_sparse.train import set_allocator

MORE_TO_DO = 3


def main(words: list[str]) -> int:
    args = parse(words)
    size = SIZES[args.size]
    folder = Path(args.out)
    clock = Clock(args.minutes)
    if args.list:
        print(listing(size))
        return 0
    # As train.py: told before torch is loaded, and what a run logs goes to the terminal.
    set_allocator()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    status = 0
    try:
        claim(size, folder)
        for name in args.parts:
            with noted(folder, name):
                do_part(size, folder, name, clock)
    except OutOfTime:
        print("stopped before the end; the same command goes on", flush=True)
        status = MORE_TO_DO
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(size, folder, args)
    return status


def parse(words: list[str]) -> argparse.Namespace:
    """The options; exits with status 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        default="outputs/study",
        help="folder of all that is written; 12 GB, up to twice that if it is stopped on the way",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--short",
        dest="size",
        action="store_const",
        const="short",
        help="about 20 minutes on an H200",
    )
    sizes.add_argument(
        "--toy",
        dest="size",
        action="store_const",
        const="toy",
        help="a minute on a CPU; says nothing",
    )
    parser.add_argument("--part", type=int, help="do this part only; --list names them")
    parser.add_argument(
        "--methods", default="", help="of the extensions only these, with commas between"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after that many: the step ends and is "
        "saved; what would not get far is not begun",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.set_defaults(size="full")
    args = parser.parse_args(words)
    names = parts(SIZES[args.size])
    least = SIZES[args.size].reserve_seconds / 60
    if not args.minutes > 2 * least:
        parser.error(
            f"--minutes {args.minutes:g} is too little for anything; write more than {2 * least:g}"
        )
    if args.part is not None and not 0 <= args.part < len(names):
        parser.error(f"--part {args.part} is none; write 0 to {len(names) - 1}")
    args.methods = [name.strip() for name in args.methods.split(",")] if args.methods else names[2:]
    for name in args.methods:
        if name not in names[2:]:
            parser.error(f"--methods {name} is unknown; write some of {','.join(names[2:])}")
    asked = names if args.part is None else [names[args.part]]
    args.parts = [name for name in asked if name in (*names[:2], *args.methods)]
    if not args.parts:
        parser.error(
            f"--part {args.part} is {names[args.part]}, which --methods leaves out; "
            "write one of them only"
        )
    return args


def parts(size: Size) -> list[str]:
    """Their names in order."""
    return ["text", PRETRAIN, *methods(size)]


def do_part(size: Size, folder: Path, name: str, clock: Clock) -> None:
    """Do what is missing of a part.

    Raises OutOfTime, and ConfigError for parts that have to be done before.
    """
    # Imported here: --list and refusals do without torch.
    if name == "text":
        from scripts.study.text import prepare_text

        vocab_size = size.model["vocab_size"]
        try:
            prepare_text(folder / "text", vocab_size, size.context, size.most_characters)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return
    ready = (folder / "text/text.json").is_file()
    require(ready, f"{name} needs part 0 in {folder}; leave --part out, or write --part 0 first")
    ready = name == PRETRAIN or is_done(size, folder, PRETRAIN)
    require(ready, f"{name} needs part 1 in {folder}; leave --part out, or write --part 1 first")

    from scripts.study.work import evaluate, train

    train(size, folder, name, clock)
    for mode in evaluations(size)[name]:
        evaluate(size, folder, name, mode, clock)


@contextlib.contextmanager
def noted(folder: Path, name: str) -> Iterator[None]:
    """Add the seconds that a part took to OUT/seconds.json, those of earlier calls too."""
    path = folder / "seconds.json"
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        seconds[name] = seconds.get(name, 0) + time.perf_counter() - began
        write_json(path, seconds)
        print(f"part {name}: {seconds[name] / 60:.1f} minutes so far", flush=True)


def listing(size: Size) -> str:
    """Each part with what it costs at most: attention as if it were dense."""
    lines = [
        f"{'part':>4} {'name':<26} {'tokens':>12} {'PFLOP linear':>13} {'PFLOP attention, dense':>23}"
    ]
    for number, name in enumerate(parts(size)):
        line = f"{number:>4} {name:<26}"
        if name != "text":
            spent = cost(size, name)
            line += f" {spent.tokens:>12,} {spent.linear / 1e15:>13.4g}"
            line += f" {spent.attention / 1e15:>23.4g}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def claim(size: Size, folder: Path) -> None:
    """Say in OUT/study.json what it holds.

    Raises ConfigError if that is a study of another size, or something else.
    """
    path = folder / "study.json"
    is_empty = folder.is_dir() and not any(folder.iterdir())
    require(
        path.is_file() or not folder.exists() or is_empty,
        f"--out {folder} holds something else; write a new or empty folder",
    )
    found = json.loads(path.read_text(encoding="utf-8"))["size"] if path.is_file() else size.name
    require(
        found == size.name,
        f"--out {folder} holds a study of the size {found}, not {size.name}; write another folder",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"size": size.name})


def write_json(path: Path, value: dict) -> None:
    """All at once: another process may read the file at the same time."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
