"""What does sparse training cost in quality? A real model, extended from 8,192 to 65,536 tokens.

    python -m scripts.study --out outputs/study
        hours on one GPU; --short: 15 minutes; --toy: a minute on a CPU
    python -m scripts.study --out outputs/study --equal-time
        each method trains for the same seconds instead of the same steps
    python -m scripts.study --out outputs/study --list
        the parts, ordered by worth
    python -m scripts.study --out outputs/study --part 0 --model FOLDER
        the text alone: needs a network, and no GPU. OUT/text can be carried to another machine
    python -m scripts.study --out outputs/study --part 3 --minutes 9
        one part, as much of it as fits into nine minutes

SmolLM2-135M-Instruct (scripts.study.real_model makes its folder) is extended with YaRN on long
documents, code, prose and both, by each method: same weights, data and order. Parts from 1 on can
run at the same time, each on a GPU of its own by CUDA_VISIBLE_DEVICES. What is there already is not
done again; a run that was stopped goes on. OUT/report has the results of all that is done. Status
0: all parts that were asked for are done; 3: stopped before the end, the same command goes on.
"""

import argparse
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.study.settings import (
    SIZES,
    START,
    OutOfTime,
    Size,
    Study,
    at_equal_time,
    evaluations,
    parts,
    runs,
    write_json,
)
from titan_sparse.config import ConfigError
from titan_sparse.config.reading import require
from titan_sparse.train import set_allocator

MORE_TO_DO = 3


def main(words: list[str]) -> int:
    args = parse(words)
    size = size_of(args)
    if args.list:
        for number, name in enumerate(parts(size)):
            print(f"{number:>4} {name}")
        return 0
    folder = Path(args.out)
    study = Study(size, folder, Path(args.model) if args.model else folder / "model")
    deadline = time.monotonic() + 60 * args.minutes
    # As train.py: told before torch is loaded, and what a run logs goes to the terminal.
    set_allocator()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    status = 0
    try:
        claim(study)
        make_model(study)
        for name in args.parts:
            with noted(folder, name):
                do_part(study, name, deadline)
    except OutOfTime:
        print("stopped before the end; the same command goes on", flush=True)
        status = MORE_TO_DO
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from scripts.study.report import report

    report(study, args)
    return status


def parse(words: list[str]) -> argparse.Namespace:
    """The options; exits with status 2 on a mistake."""
    args = _parser().parse_args(words)
    error = _parser().error
    size = size_of(args)
    names = parts(size)
    least = size.reserve_seconds / 60
    if not args.minutes > 2 * least:
        error(
            f"--minutes {args.minutes:g} is too little for anything; write more than {2 * least:g}"
        )
    if args.part is not None and not 0 <= args.part < len(names):
        error(f"--part {args.part} is none; write 0 to {len(names) - 1}")
    known = list(runs(size))
    args.runs = [name.strip() for name in args.runs.split(",")] if args.runs else known
    for name in args.runs:
        if name not in known:
            error(f"--runs {name} is unknown; write some of {','.join(known)}")
    asked = names if args.part is None else [names[args.part]]
    args.parts = [name for name in asked if name not in known or name in args.runs]
    if not args.parts:
        error(f"--part {args.part} is {asked[0]}, which --runs leaves out; write one of them only")
    return args


def size_of(args: argparse.Namespace) -> Size:
    size = SIZES[args.size]
    return at_equal_time(size) if args.equal_time else size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", default="outputs/study", help="folder of all that is written; up to 50 GB"
    )
    parser.add_argument(
        "--model",
        help="folder of SmolLM2-135M-Instruct, as scripts.study.real_model writes it; "
        "made in OUT/model by default",
    )
    sizes = parser.add_mutually_exclusive_group()
    for name, text in (
        ("long", "131,072 tokens instead of 65,536, with fewer steps"),
        ("short", "about 15 minutes on an H200"),
        ("toy", "a minute on a CPU, a model of random weights; says nothing"),
    ):
        sizes.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=text)
    parser.add_argument(
        "--equal-time",
        action="store_true",
        help="each method has as many steps as fit into the time of the dense ones",
    )
    parser.add_argument("--part", type=int, help="do this part only; --list names them")
    parser.add_argument(
        "--runs", default="", help="of the extensions only these, with commas between"
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
    return parser


def make_model(study: Study) -> None:
    """Write OUT/model, unless it is there or --model says another. Raises ConfigError."""
    if (study.model / "config.json").is_file():
        return
    made_here = study.model == study.folder / "model"
    require(made_here, f"--model {study.model} has no config.json; write a folder that has")
    # Imported here: refusals do without torch.
    from scripts.study import real_model

    if study.size.name == "toy":
        real_model.write_toy_model(study.model)
        return
    try:
        real_model.make_model(study.folder / "packages", study.model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def do_part(study: Study, name: str, deadline: float) -> None:
    """Do what is missing of a part. Raises OutOfTime, and ConfigError for what has to be first."""
    if name == "text":
        from scripts.study.text import prepare_text

        try:
            prepare_text(study.folder, study.model, study.size.text)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return
    require(
        (study.text / "text.json").is_file(),
        f"{name} needs part 0 in {study.folder}; leave --part out, or write --part 0 first",
    )
    from scripts.study.work import evaluate, train

    if name != START:
        train(study, runs(study.size)[name], deadline)
    for evaluation in evaluations(study.size)[name]:
        evaluate(study, evaluation, deadline)


@contextlib.contextmanager
def noted(folder: Path, name: str) -> Iterator[None]:
    """Add the seconds that a part took to OUT/seconds/NAME.json, which includes those of earlier calls."""
    path = folder / "seconds" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else 0
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds = before + time.perf_counter() - began
        write_json(path, seconds)
        print(f"part {name}: {seconds / 60:.1f} minutes so far", flush=True)


def claim(study: Study) -> None:
    """Record the study's size in OUT/study.json.

    Raises ConfigError if the folder holds a study of another size, or something else. Text copied
    from another machine may already be there.
    """
    folder = study.folder
    path = folder / "study.json"
    known = {"text", "model", "packages"}
    others = {item.name for item in folder.iterdir()} - known if folder.is_dir() else set()
    require(
        path.is_file() or not others,
        f"--out {folder} holds something else; write a new or empty folder",
    )
    name = study.size.title
    found = json.loads(path.read_text(encoding="utf-8"))["size"] if path.is_file() else name
    require(
        found == name,
        f"--out {folder} holds a study of the size {found}, not {name}; write another folder",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"size": name})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
