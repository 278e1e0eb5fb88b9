"""Writes the tables of numbers in README.md and docs/ from the JSON files of benchmarks/results.

    python -m scripts.docs.numbers            write the pages
    python -m scripts.docs.numbers --check    write nothing; status 1 if a page is stale

A page shows a table between the comments <!-- table NAME --> and <!-- end of table -->. NAME is a
function of this file.
"""

import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median, stdev

from titan_sparse.commands import parser_of

ROOT = Path(__file__).parents[2]
_TABLE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.docs.numbers")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if stale")
    args = parser.parse_args(words)
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        wanted = with_tables(text)
        if wanted != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(wanted, encoding="utf-8")
    if stale and args.check:
        print(f"stale: {', '.join(stale)}. Run python -m scripts.docs.numbers", file=sys.stderr)
        return 1
    return 0


def with_tables(text: str) -> str:
    """The page with up-to-date tables. Raises ValueError for an unknown table."""

    def table(match: re.Match) -> str:
        begin, name, _, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name}. Write one of {', '.join(TABLES)}")
        content = "\n".join(TABLES[name]())
        return begin + content + "\n" + end

    return _TABLE.sub(table, text)


@functools.cache
def result(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def row(file: str, /, **wanted: object) -> dict:
    """The first row of a result file that has these values."""
    for candidate in result(file)["rows"]:
        if wanted.items() <= candidate.items():
            return candidate
    raise LookupError(f"{file} has no row with {wanted}")


def lines(heads: str, rows: Iterable[list[str]]) -> list[str]:
    """A Markdown table. heads: separated by "|"."""
    names = [head.strip() for head in heads.split("|")]
    table = ["| " + " | ".join(cells) + " |" for cells in [names, *rows]]
    return [table[0], "|---" * len(names) + "|", *table[1:]]


# README -------------------------------------------------------------------------------------------


def headlines() -> list[str]:
    """Steps and losses of recall 0.95 next to dense ones, after the same seconds."""
    methods = ("recall_95", "dense")
    rows = []
    for file in LARGER:
        runs = result(file)["runs"]
        steps = [f"{runs[name]['step_seconds']:.2f} s" for name in methods]
        seconds = f"{runs['dense']['seconds'][-1]:.0f} s"
        losses = [_range_of_seeds(file, name) for name in methods]
        rows.append([result(file)["model"], _tokens(file), *steps, seconds, *losses])
    return lines("model | tokens | step | dense step | after | held-out loss | dense loss", rows)


def _tokens(file: str) -> str:
    return f"{max(result(file)['lengths']):,}"


def _range_of_seeds(file: str, method: str) -> str:
    """The lowest and the highest loss of a method, as trained. Raises
    LookupError for a single seed."""
    losses = _scores(file, method, method, "loss")
    if len(losses) < 2:
        raise LookupError(f"{file} has one seed of {method}; a headline needs two")
    return f"{min(losses):.3f} to {max(losses):.3f}"


# Attention on one GPU -----------------------------------------------------------------------------


def attention_by_length() -> list[str]:
    rows = []
    for seq_len in (4096, 16384, 65536, 131072, 262144, 524288):
        file = "attention_h200_length" if seq_len == 524288 else "attention_h200"
        cells = [f"{seq_len:,}"]
        for name in ("cudnn", "flash-attn-4", "flex", "triton"):
            wanted = {} if name in ("cudnn", "flash-attn-4") else {"target_density": 0.05}
            found = row(file, name=name, seq_len=seq_len, **wanted)
            total = found["forward_ms"] + found["backward_ms"]
            cells.append(f"{total:,.{2 if seq_len <= 16384 else 1}f}")
        rows.append([*cells, f"{found['selection_ms']:.{2 if seq_len <= 65536 else 1}f}"])
    return lines("tokens | cuDNN | FlashAttention-4 | flex | triton | selection", rows)


SPARSE_PAYS = ("choose_h200", "sparse_pays_h100")
"""Files of scripts.benchmarks.sparse_pays, and one of titan-sparse choose before it.
Those that exist count."""


def sparse_pays() -> list[str]:
    """The number of steps of each recall in the time of a dense one, by device and length."""
    cases: dict[tuple[str, int], dict[str, float]] = {}
    for file in SPARSE_PAYS:
        if (ROOT / f"benchmarks/results/{file}.json").is_file():
            for found in result(file)["rows"]:
                gpu = found.get("gpu", result(file)["gpu"]).removeprefix("NVIDIA ").split()[0]
                seconds = cases.setdefault((gpu, found["tokens"]), {})
                seconds[found["setting"]] = found["step_seconds"]
    rows = []
    for (gpu, tokens), seconds in sorted(cases.items()):
        dense = seconds.pop("dense")
        speeds = [f"{dense / sparse:.2f}" for sparse in seconds.values()]
        rows.append([gpu, f"{tokens:,}", f"{dense:.2f}", *speeds])
    recalls = " | ".join(seconds)
    return lines(f"GPU | tokens | dense, s per step | {recalls}", rows)


# Context parallelism ------------------------------------------------------------------------------


def scaling() -> list[str]:
    """Speed of attention over four GPUs."""
    labels = {"alone": "one GPU alone", "double_ring": "double_ring, 2 x 2"}
    rows = []
    for backend, file in (("triton", ""), ("flex", "_flex")):
        for schedule in ("alone", "all_gather", "ring", "double_ring"):
            if backend == "flex" and schedule == "double_ring":
                continue
            found = row(f"context_parallel{file}_4xh200", case="scaling", schedule=schedule)
            label = labels.get(schedule, schedule)
            rate = f"{found['visited_tflops']:.0f}"
            of_one = f"{found.get('of_alone', 1):.3f}"
            times = f"{found['forward_ms']:,.1f} + {found['backward_ms']:,.1f}"
            rows.append([backend, label, times, rate, of_one])
    return lines("backend | schedule | fwd + bwd | TFLOP/s per GPU | of one GPU", rows)


def ulysses() -> list[str]:
    """Milliseconds of attention over two GPUs by schedule; the shortest and the longest."""
    schedules = ("all_gather", "ring", "ulysses")
    cases: dict[tuple[str, str], list[str]] = {}
    for case in ("dense", "sparse"):
        for ran in result("context_parallel_ulysses_2xh100")["rows"]:
            if ran["case"] == case and ran["tokens_per_gpu"] in (16384, 131072):
                setup = (f"{ran['tokens_per_gpu']:,}", "{}:{}".format(*ran["heads"]))
                cases.setdefault(setup, []).append(f"{ran['total_ms']:,.1f}")
    rows = [[*setup, *times] for setup, times in cases.items()]
    names = [f"{case}, {schedule}" for case in ("dense", "sparse") for schedule in schedules]
    return lines(" | ".join(["tokens per GPU", "heads", *names]), rows)


# Training steps -----------------------------------------------------------------------------------


def speed(logged: list[dict]) -> float:
    """Tokens/s of a GPU, median of the steps after the first, which compiles."""
    return median(step["tokens_per_second_per_device"] for step in logged[1:])


def steps() -> list[str]:
    """Whole steps: seconds, tokens/s of all GPUs, MFU, and memory."""
    rows = []
    three_b = result("step_3b_128k_density_h100")["runs"]
    long = row("step_qwen2_5_3b_512k_h200", name="sparse3b")
    longest = result("step_long_2xh200")["runs"]
    qwen, llama = (longest[f"{name}, vertical_slash"] for name in ("Qwen2.5-3B", "Llama-3.1-8B"))
    for label, tokens, attention, ranks, run in (
        ("Qwen2.5-3B, one H100", "131,072", "dense, flex", 1, three_b["dense"]),
        ("Qwen2.5-3B, one H100", "131,072", "sparse, flex", 1, three_b["sparse"]),
        ("Qwen2.5-3B, one", "524,288", "sparse, flex", 1, long),
        ("Qwen2.5-3B, two", "1,048,576", "sparse, triton", 2, qwen),
        ("Llama-3.1-8B, two", "650,240", "sparse, triton", 2, llama),
    ):
        logged = run["steps"][1:]
        last = logged[-1]
        cells = [f"{median(step['step_seconds'] for step in logged):.1f}"]
        cells += [f"{ranks * speed(run['steps']):,.0f}"]
        cells += [f"{100 * last['mfu']:.0f} %", f"{last['memory_gib']:.1f}"]
        rows.append([label, tokens, attention, *cells, f"{100 * last['density']:.1f} %"])
    heads = "model, GPUs | tokens | attention | s per step | tokens/s | MFU | peak GiB per GPU"
    return lines(f"{heads} | density", rows)


# Other trainers -----------------------------------------------------------------------------------


def trainers() -> list[str]:
    return _steps_of_arms(["trainers", "trainers_qwen_h200"], "torchtitan", "transformers")


def step_graphs() -> list[str]:
    """Seconds of a step with CUDA graphs, and without them in parentheses."""
    arms = ("torchtitan", "ours, dense", "ours, vertical_slash")
    cases: dict[tuple, dict[str, str]] = {}
    for file in ("trainers_graphs_2xh100", "trainers_graphs_2xh200"):
        # "2 x NVIDIA H100 80GB HBM3"
        gpu = result(file)["gpu"].split()[3]
        for ran in result(file)["rows"]:
            case = (f"{ran['shape'].upper()}, {gpu}", str(ran["gpus"]), f"{ran['tokens']:,}")
            cases.setdefault(case, {})[ran["arm"]] = f"{ran['step_ms'] / 1e3:.3f}"
    rows = []
    for case, cells in cases.items():
        if not cells.keys() >= set(arms):
            continue
        without = [cells.get(f"{arm}, no graphs") for arm in arms]
        row = [cells.get(arm, "") + (f" ({off})" if off else "") for arm, off in zip(arms, without)]
        rows.append([*case, *row])
    return lines(" | ".join(["model", "GPUs", "tokens per GPU", *arms]), rows)


def huggingface_steps() -> list[str]:
    return _steps_of_arms(["huggingface_h200"], "sdpa")


def hybrid() -> list[str]:
    return _steps_of_arms(["hybrid_h100"], "transformers")


def _steps_of_arms(files: list[str], *peers: str) -> list[str]:
    """Seconds and GiB of a step. A row that names its gpu was measured on
    another than the file's."""
    arms = (*peers, "ours, dense", "ours, vertical_slash")
    cases: dict[tuple[str, str], dict[str, str]] = {}
    for ran in itertools.chain(*(result(file)["rows"] for file in files)):
        name = " on ".join([ran["shape"].upper(), *filter(None, [ran.get("gpu")])])
        cell = "out of memory"
        if "OutOfMemoryError" not in ran.get("error", ""):
            cell = f"{ran['step_ms'] / 1e3:.2f} ({ran['peak_bytes'] / 2**30:.1f})"
        cases.setdefault((name, f"{ran['tokens']:,}"), {})[ran["arm"]] = cell
    rows = [[*case, *(cells.get(arm, "") for arm in arms)] for case, cells in cases.items()]
    return lines(" | ".join(["model", "tokens", *arms]), rows)


# The real model -----------------------------------------------------------------------------------


DENSELY = "dense"
"""The attention that reads any weights."""


def equal_time() -> list[str]:
    """Means over seeds of the runs that had the same seconds."""
    file = "study_equal_time_h100"
    rows = []
    for method, cells in _trained(file):
        for mode in (method, DENSELY):
            cells.append(f"{mean(_scores(file, method, mode, 'loss')):.3f}")
        rows.append([*cells, _needles(file, method)])
    heads = "attention | density | s per step | steps | held-out loss | dense eval"
    return lines(f"{heads} | needle accuracy", rows)


LARGER = [
    f"study_qwen_{size}_{length}_h200" for length in ("128k", "64k") for size in ("1_5b", "0_5b")
]
"""Files of Qwen2.5-Coder at equal time."""
MORE_VERTICALS = "study_qwen_0_5b_128k_caps_h200"
"""The same for a larger max_verticals."""
SMALLER = "study_smollm2_128k_h200"
"""SmolLM2 at equal time and the longer length."""


def larger_model() -> list[str]:
    """Larger models at equal time, and SmolLM2 beside them: losses and names, as trained and read
    densely, by seeds."""
    rows = []
    for file in [*LARGER, MORE_VERTICALS, SMALLER]:
        model = result(file)["model"].rpartition("-")[2]
        for method, cells in _trained(file):
            if file == MORE_VERTICALS:
                cells[0] += ", 16,384 verticals"
            for measure in ("loss", "loss, names, far"):
                own, densely = (
                    _mean_and_spread(_scores(file, method, mode, measure))
                    for mode in (method, DENSELY)
                )
                cells += [own, "" if method == DENSELY else densely]
            rows.append([model, _tokens(file), *cells, _needles(file, method)])
    heads = "model | tokens | attention | density | s per step | steps | held-out loss"
    return lines(f"{heads} | read densely | far names | read densely | needles", rows)


def _trained(file: str) -> Iterator[tuple[str, list[str]]]:
    """Each method of a study, with its name, density, seconds of a step, and steps as cells."""
    runs = result(file)["runs"]
    for method in dict.fromkeys(run["method"] for run in runs.values()):
        density = _evaluated(file, method, method)["attention"]["density"]
        seconds = runs[method]["step_seconds"]
        cells = [method.replace("_", " 0."), f"{100 * density:.1f} %", f"{seconds:.2f}"]
        yield method, [*cells, str(runs[method]["steps"][-1])]


def _needles(file: str, method: str) -> str:
    return f"{mean(_scores(file, method, method, 'needle forced')):.0f} %"


def _mean_and_spread(scores: list[float]) -> str:
    """The mean of the seeds, and the standard deviation where there are several."""
    spread = f" ± {stdev(scores):.3f}" if len(scores) > 1 else ""
    return f"{mean(scores):.3f}{spread}"


def choose_larger() -> list[str]:
    """titan-sparse choose at recall 0.95: larger models by length, next to SmolLM2's density."""
    rows = []
    for size in ("1.5B", "0.5B"):
        file = f"choose_qwen_{size.lower().replace('.', '_')}_h200"
        for tokens in (32768, 65536, 131072):
            wanted = {"tokens": tokens, "setting": "recall 0.95"}
            code, prose = (row(file, **wanted, text=text) for text in ("code", "prose"))
            dense = row(file, tokens=tokens, setting="dense", text="code")
            densities = (one["density"] for one in (code, prose, row("choose_h200", **wanted)))
            cells = [size, f"{tokens:,}", *(f"{100 * density:.1f} %" for density in densities)]
            cells.append(f"{dense['step_seconds'] / code['step_seconds']:.1f}")
            rows.append([*cells, *(f"{one['above_dense']:.3f}" for one in (code, prose))])
    heads = "model | tokens | density, code | prose | SmolLM2 | speed"
    return lines(f"{heads} | loss above dense, code | prose", rows)


def ruler() -> list[str]:
    """Scores of RULER's tasks, in percent, by weights and the attention that reads them."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for size in ("1.5B", "0.5B"):
        for one in result(f"ruler_qwen_{size.lower().replace('.', '_')}_h200")["rows"]:
            sides = (one[side].replace("_", " 0.") for side in ("weights", "mode"))
            rows.setdefault((size, *sides), {})[one["task"]] = f"{100 * one['score']:.0f}"
    tasks = next(iter(rows.values()))
    return lines(
        " | ".join(["model", "trained with", "read by", *tasks]),
        [[*case, *scores.values()] for case, scores in rows.items()],
    )


def equal_steps() -> list[str]:
    """Loss above dense after the same steps on the same data."""
    file = "study_equal_steps_h100"
    base = _evaluated(file, "dense", "dense")["scores"]
    rows = []
    for name in ("recall_90", "recall_95", "recall_97"):
        densely, as_trained = (_evaluated(file, name, mode)["scores"] for mode in ("dense", name))
        above = [f"{scores['loss'] - base['loss']:.4f}" for scores in (densely, as_trained)]
        lost = base["needle forced"] - densely["needle forced"]
        rows.append([name.replace("_", " 0."), *above, f"{lost:.1f}"])
    return lines(
        "trained with | dense eval | as trained | needles lost in dense eval, percent", rows
    )


def _scores(file: str, method: str, mode: str, measure: str) -> list[float]:
    """The scores of each seed of a method, as `mode` reads its weights."""
    rows = result(file)["evaluations"]
    wanted = {"method": method, "mode": mode}
    return [one["scores"][measure] for one in rows if wanted.items() <= one.items()]


def _evaluated(file: str, name: str, mode: str) -> dict:
    for one in result(file)["evaluations"]:
        if one["weights"] == name and one["mode"] == mode:
            return one
    raise LookupError(f"{file} has no evaluation of {name} by {mode}")


TABLES = {
    table.__name__: table
    for table in (
        headlines,
        attention_by_length,
        sparse_pays,
        scaling,
        ulysses,
        steps,
        trainers,
        step_graphs,
        huggingface_steps,
        hybrid,
        equal_time,
        larger_model,
        choose_larger,
        ruler,
        equal_steps,
    )
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
