"""Measure what sparse training costs in quality. A real model, extended from 8,192 to 65,536
tokens.

    python -m scripts.study --out outputs/study
        hours on one GPU; --short: 15 minutes; --toy: a minute on a CPU
    python -m scripts.study --out outputs/study --equal-time
        each method trains for the same seconds instead of the same steps
    python -m scripts.study --out outputs/study --parts text --model FOLDER
        the text alone: needs a network, and no GPU. OUT/text can be carried to another machine
    python -m scripts.study --out outputs/study --parts dense,recall_95 --minutes 9
        two runs with their evaluations, as much of them as fits into nine minutes

SmolLM2-135M-Instruct, or another --model of scripts.study.real_model, is extended with YaRN on long
documents, code, prose and both, by each method: same weights, data and order. Other words are
options of the configuration that all runs share, as --activation_checkpoint.mode full. Parts but
the text can run at the same time, each on a GPU of its own by CUDA_VISIBLE_DEVICES. What is there
already is not done again, and a run that was stopped goes on. OUT/report has the results of all
that is done. Status 0: all parts that were asked for are done. Status 3: stopped before the end,
and the same command goes on.
"""

import argparse
import json
import logging
import math
import sys
import time
from pathlib import Path

from scripts.study.settings import (
    SIZES,
    START,
    OutOfTime,
    Study,
    at_equal_time,
    check_options,
    evaluations,
    read_json,
    runs,
)
from titan_sparse.commands import parser_of
from titan_sparse.commands.train import set_allocator
from titan_sparse.config.reading import Refusal, require

MORE_TO_DO = 3


def main(words: list[str]) -> int:
    args, study = parse(words)
    deadline = time.monotonic() + 60 * args.minutes
    # As in train.py: before torch is loaded. What a run logs goes to the terminal.
    set_allocator()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    from scripts.study.report import report

    status = 0
    try:
        check_folder(study)
        make_model(study)
        check_options(study, args.parts)
        claim(study)
        for name in args.parts:
            began = time.monotonic()
            try:
                do_part(study, name, deadline)
            finally:
                minutes = (time.monotonic() - began) / 60
                print(f"part {name}: {minutes:.1f} minutes", flush=True)
    except OutOfTime:
        print("stopped before the end; the same command goes on", flush=True)
        status = MORE_TO_DO
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(study, args)
    return status


def parse(words: list[str]) -> tuple[argparse.Namespace, Study]:
    """The options, with the names of the parts to do; exits with status 2 on a mistake."""
    parser = parser_of(__doc__, "scripts.study")
    add = parser.add_argument
    add("--out", default="outputs/study", help="folder of all that is written; up to 50 GB")
    add("--model", help="folder that scripts.study.real_model wrote; default: made in OUT/model")
    for name, text in (
        ("short", "about 15 minutes on an H200"),
        ("long", "131,072 tokens, fewer steps"),
        ("toy", "a minute on a CPU, a model of random weights; the numbers mean nothing"),
    ):
        add(f"--{name}", dest="size", action="store_const", const=name, default="full", help=text)
    add("--equal-time", action="store_true", help="as many steps as fit into the dense ones' time")
    add("--parts", default="", help="only these, with commas between: text, start, names of runs")
    text = "stop after that many: the step ends and is saved; what would not get far is not begun"
    add("--minutes", type=float, default=math.inf, help=text)
    args, rest = parser.parse_known_args(words)
    size = at_equal_time(SIZES[args.size]) if args.equal_time else SIZES[args.size]
    least = size.reserve_seconds / 30
    if not args.minutes > least:
        parser.error(f"--minutes {args.minutes:g} is too little; write more than {least:g}")
    names = ["text", START, *runs(size)]
    args.parts = args.parts.split(",") if args.parts else names
    unknown = set(args.parts) - set(names)
    if unknown:
        parser.error(f"--parts {min(unknown)} is unknown; write some of {','.join(names)}")
    folder = Path(args.out)
    model = Path(args.model) if args.model else folder / "model"
    return args, Study(size, folder, model, tuple(rest))


def make_model(study: Study) -> None:
    """Write OUT/model, unless it is there or --model names another. Raises Refusal."""
    if (study.model / "config.json").is_file():
        return
    made_here = study.model == study.folder / "model"
    require(made_here, f"--model {study.model} has no config.json; write a folder that has")
    from scripts.study import real_model

    if study.size.name == "toy":
        real_model.write_toy_model(study.model)
    else:
        real_model.make_model(
            real_model.SOURCES[real_model.SMOLLM2], study.folder / "packages", study.model
        )


def do_part(study: Study, name: str, deadline: float) -> None:
    """Do what is missing of a part. Raises OutOfTime, and Refusal for what has to be first."""
    if name == "text":
        from scripts.study.text import prepare_text

        prepare_text(study.folder, study.model, study.size)
        return
    require(
        (study.text / "text.json").is_file(),
        f"{name} needs the part text in {study.folder}; leave --parts out, or write --parts text first",
    )
    from scripts.study.work import evaluate, train

    if name != START:
        train(study, runs(study.size)[name], deadline)
    for evaluation in evaluations(study.size)[name]:
        evaluate(study, evaluation, deadline)


def check_folder(study: Study) -> None:
    """Raises Refusal if the folder holds a study of another size, or something else.

    Text copied from another machine may already be there.
    """
    folder = study.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not study.claim_file.is_file():
        others = {item.name for item in folder.iterdir()} - {"text", "model", "packages"}
        require(not others, f"--out {folder} holds something else; write a new or empty folder")
        return
    found = read_json(study.claim_file)["size"]
    require(
        found == study.title,
        f"--out {folder} holds a study of the size {found}, not {study.title}; "
        "write another folder",
    )


def claim(study: Study) -> None:
    """Record the study's size, once: parts that run at the same time read it."""
    if not study.claim_file.is_file():
        study.claim_file.write_text(json.dumps({"size": study.title}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
