"""The results of scripts.benchmarks.many_gpus as Markdown, a table or more a part, goals beside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks.many_gpus import results

GOALS_OF_ALONE = {4: 0.88, 8: 0.85}
"""Share of one GPU's speed, by the number of GPUs."""
GOAL_OF_LIMIT = 1.10
"""A double ring's time / the longer of computing and transfers."""
MAGI_ATTENTION = "459 / 360"
"""TFLOP/s a GPU that MagiAttention published for packed documents."""
TRL_SECONDS = 380
"""A dense step of Qwen3-8B at 1,048,576 tokens on 8 GPUs, that TRL published."""

Found = Iterator[tuple[str, dict]]
"""(name, result) of each file."""


def tables(out: Path) -> str:
    """All tables of the results in the folder `out`, and a line for each that is not whole."""
    parts = [
        ("1. Attention scaling", scaling(out)),
        ("1. Dense attention", dense(out)),
        ("1. Double ring over two pretended nodes", nodes(out)),
        (f"2. Packed documents and a window (MagiAttention: {MAGI_ATTENTION})", masks(out)),
        (f"3 and 4. Training steps (TRL, Qwen3-8B, 1M, 8 GPUs: {TRL_SECONDS} s)", steps(out)),
        ("5. Parity with one rank", parity(out)),
        ("5. Faults", faults(out)),
        ("5. Soak", soak(out)),
        ("5. Restart, seconds", restart(out)),
    ]
    lines = about(out)
    for title, table in parts:
        if len(table) > 2:
            lines += ["", f"## {title}", "", *table]
    lines += ["", "## Not complete", "", *unfinished(out)]
    return "\n".join(lines) + "\n"


def files(out: Path, kind: str) -> Found:
    """Results whose names begin with the kind, those of fewer GPUs first."""
    found = []
    for path in sorted(out.glob(f"{kind}_*.json")):
        found.append((path.stem, results.read(path)))
    yield from sorted(found, key=lambda item: item[1].get("ranks", 0))


def rows_of(out: Path, kind: str) -> Iterator[tuple[dict, dict]]:
    """(result, row) of every row that holds a measurement."""
    for _, result in files(out, kind):
        for row in result.get("rows", []):
            if "error" not in row:
                yield result, row


def table(*heads: str) -> list[str]:
    return [line(*heads), "|" + "---|" * len(heads)]


def line(*cells: Any) -> str:
    """A row of a table. None: nothing."""
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def both_ms(row: dict) -> str:
    return f"{row['forward_ms']:.1f} + {row['backward_ms']:.1f}"


def number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def about(out: Path) -> list[str]:
    """What the numbers belong to: machines, versions and commits of all results."""
    seen = {}
    for path in sorted(out.glob("*.json")):
        result = results.read(path)
        versions = result.get("versions", {})
        wanted = ("torch", "triton", "flash-attn-4")
        kinds = ", ".join(f"{name} {versions.get(name)}" for name in wanted)
        seen[f"{result.get('gpu')}, {kinds}, commit {result.get('commit')}"] = None
    return ["# Several GPUs", "", *seen]


def scaling(out: Path) -> list[str]:
    lines = table(
        "tokens", "GPUs", "kernel", "schedule", "fwd + bwd, ms", "TFLOP/s a GPU", "of one", "goal"
    )
    for result, row in rows_of(out, "scaling"):
        is_alone = row["schedule"] == "alone"
        goal = None if is_alone else GOALS_OF_ALONE.get(result["ranks"])
        cells = [row["seq_len"], result["ranks"], row["backend"], row["schedule"], both_ms(row)]
        cells += [number(row["visited_tflops"], 0), number(row.get("of_alone"), 3), goal]
        lines.append(line(*cells))
    return lines


def dense(out: Path) -> list[str]:
    lines = table("tokens", "GPUs", "", "kernel", "fwd + bwd, ms", "TFLOP/s a GPU")
    for result, row in rows_of(out, "dense"):
        name = f"{row['name']}, {row.get('rotate') or row['layout'] + ' ' + row['schedule']}"
        cells = [row["seq_len"], result["ranks"], name, row.get("backend", "cuDNN")]
        lines.append(line(*cells, both_ms(row), number(row["tflops"], 0)))
    return lines


def nodes(out: Path) -> list[str]:
    heads = ("tokens", "GPUs", "gradients", "schedule", "fwd + bwd, ms", "computing alone")
    lines = table(*heads, "outer hops alone", "of the longer", "goal")
    for result, row in rows_of(out, "nodes"):
        if "schedule" not in row:  # compares two rows
            continue
        limits = []
        for name in ("compute_alone", "outer_alone"):
            limits.append(both_ms(row[name]) if name in row else None)
        share = row.get("total_of_limit")
        goal = None if share is None else GOAL_OF_LIMIT
        cells = [row["seq_len"], result["ranks"], row["gradient_dtype"], row["schedule"]]
        lines.append(line(*cells, both_ms(row), *limits, number(share, 3), goal))
    return lines


def masks(out: Path) -> list[str]:
    heads = ("tokens a GPU", "GPUs", "mask", "layout", "schedule", "kernel", "fwd + bwd, ms")
    lines = table(
        *heads, "TFLOP/s a GPU, fwd / bwd", "times faster than torch", "MB sent of needed"
    )
    for result, row in rows_of(out, "masks"):
        is_ours = row["name"] == "ours"
        schedule = row["schedule"] if is_ours else f"torch, {row['rotate']}"
        if row.get("overlap_stages"):
            schedule += f", {row['overlap_stages']} stages"
        mask = row["mask"] if is_ours else "causal"
        cells = [row["seq_len"] // result["ranks"], result["ranks"], mask, row.get("layout")]
        cells += [schedule, row.get("backend", "cuDNN"), both_ms(row)]
        cells.append(f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}")
        cells.append(number(row.get("total_times_faster_than_torch"), 2))
        lines.append(line(*cells, number(row.get("sent_of_needed"), 2)))
    return lines


def steps(out: Path) -> list[str]:
    heads = ("model", "GPUs", "tokens", "pattern", "layers", "kernel", "s a step", "tokens/s")
    lines = table(*heads, "MFU", "peak GiB (expected)", "density", "recall")
    for _, result in files(out, "step"):
        if result.get("rows"):
            lines.append(line(*step_cells(result)))
    return lines


def step_cells(result: dict) -> list[Any]:
    """Means of the steps after the first, which compiles; of the first where there is no other."""
    words = result["train"]
    first, *timed = result["rows"]
    rows = timed or [first]
    seconds = mean(rows, "step_seconds")
    tokens = int(option(words, "--training.seq_len"))
    peak = max(row["memory_gib"] for row in result["rows"])
    mfu = None if rows[0].get("mfu") is None else mean(rows, "mfu")
    return [
        Path(option(words, "--config")).stem,
        result["ranks"],
        f"{tokens:,}",
        option(words, "--attention.pattern") or "vertical_slash",
        option(words, "--model.layers") or "all",
        (result.get("kernel") or "").partition(";")[0],
        f"{seconds:.1f}" + ("" if timed else ", the first, with compiling"),
        number(tokens / seconds, 0),
        percent(mfu),
        f"{peak:.1f} ({result['expected_gib']})",
        percent(rows[-1].get("density")),
        number(first.get("recall"), 3),
    ]


def mean(rows: list[dict], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def option(words: list[str], key: str) -> str | None:
    """The last value of a key on a command line."""
    value = None
    for word, after in zip(words, words[1:]):
        if word == key:
            value = after
    return value


def parity(out: Path) -> list[str]:
    lines = table("mesh", "GPUs", "loss differs by", "gradient norm differs by", "within bounds")
    for result, row in rows_of(out, "parity"):
        found = row["differences"]
        cells = [row["mesh"], result["ranks"], f"{found['loss']:.2g}", f"{found['grad_norm']:.2g}"]
        lines.append(line(*cells, "yes" if row["equal"] else "NO"))
    return lines


def faults(out: Path) -> list[str]:
    lines = table("fault", "GPUs", "named", "s to the end", "timeout, s")
    for kind in ("hang", "kill"):
        for result, row in rows_of(out, kind):
            named = "yes" if row["named"] else "NO"
            cells = [row["fault"], result["ranks"], named, row["seconds"], row["timeout_seconds"]]
            lines.append(line(*cells))
    return lines


def soak(out: Path) -> list[str]:
    heads = ("GPUs", "steps", "kills", "lines equal to the bit", "largest difference of losses")
    lines = table(*heads, "skipped", "memory growth, GiB", "s", "s to restart", "problems")
    for _, result in files(out, "soak"):
        if "lines" not in result:
            continue
        equal = f"{result['lines_equal_to_the_bit']} of {result['lines']}"
        cells = [result["options"]["ranks"], result["steps"], result["kills"], equal]
        cells += [result["largest_difference_of_losses"], result["skipped_updates"]]
        cells += [number(result["memory_growth_gib"], 3), result["seconds"]]
        lines.append(line(*cells, result["restart_seconds"], len(result["problems"])))
    return lines


def restart(out: Path) -> list[str]:
    """From kill -9 to the end of the next step, by phase."""
    lines = []
    for result, row in rows_of(out, "restart"):
        if not lines:
            lines = table("GPUs", *row)
        lines.append(line(result["options"]["ranks"], *row.values()))
    return lines


def unfinished(out: Path) -> list[str]:
    """What is missing, and why: whole results, and rows."""
    lines = []
    for path in sorted(out.glob("*.json")):
        result = results.read(path)
        why = result.get("not_run") or result.get("error")
        if why:
            first, *others = why.strip().splitlines()
            last = f" ... {others[-1][:300]}" if others else ""
            lines.append(f"* {path.stem}: {first[:200]}{last}")
        for row in result.get("rows", []):
            if "error" in row:
                named = [str(row[key]) for key in ("name", "schedule", "layout") if key in row]
                lines.append(f"* {path.stem}: {' '.join(named)}: {row['error'][:300]}")
    return lines or ["nothing"]
