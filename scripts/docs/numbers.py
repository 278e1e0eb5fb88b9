"""Writes the tables of numbers in README.md and docs/ from the JSON files of benchmarks/results.

    python -m scripts.docs.numbers            write the pages
    python -m scripts.docs.numbers --check    write nothing; status 1 if a page is stale

A page shows a table between the comments <!-- table NAME --> and <!-- end of table -->. NAME is a
function of this file.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[2]
_TABLE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    """The page with the tables of today. ValueError for a table that does not exist."""

    def table(match: re.Match) -> str:
        begin, name, _, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name}. Write one of {', '.join(TABLES)}")
        return begin + "\n".join(TABLES[name]()) + "\n" + end

    return _TABLE.sub(table, text)


@functools.cache
def result(name: str) -> dict:
    """A file of benchmarks/results."""
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
    cells = [names, ["---"] * len(names), *rows]
    return ["| " + " | ".join(of_row) + " |" for of_row in cells]


def ms(found: dict, digits: int) -> str:
    """Milliseconds of the forward and the backward."""
    return f"{found['forward_ms']:,.{digits}f} + {found['backward_ms']:,.{digits}f}"


# README -------------------------------------------------------------------------------------------


def headlines() -> list[str]:
    """Three measurements beside dense ones."""
    times = []
    for name in ("flex", "cudnn"):
        found = row("attention_h200", name=name, seq_len=131072)
        times.append(f"{found['forward_ms'] + found['backward_ms']:.1f} ms")
    steps = []
    for options, digits in (("--attention.backend flex", 2), ("--attention.pattern dense", 1)):
        measured = row("step_qwen2_5_0_5b_128k_h200", options=options)["tokens_per_second"]
        steps.append(f"{131072 / mean(measured):.{digits}f} s")
    losses = [
        f"{_held_out(_evaluated('study_real_h200', name, name)):.3f}"
        for name in ("default", "dense")
    ]
    rows = [
        ["attention, forward and backward, 131,072 tokens", *times],
        ["training step, Qwen2.5-0.5B, 131,072 tokens", *steps],
        ["held-out loss at 65,536 tokens, SmolLM2-135M", *losses],
    ]
    return lines("what was measured | titan_sparse | dense", rows)


# Attention on one GPU -----------------------------------------------------------------------------


def attention_by_length() -> list[str]:
    rows = []
    for seq_len in (4096, 16384, 65536, 131072, 262144, 524288):
        file = "attention_h200_length" if seq_len == 524288 else "attention_h200"
        digits = 2 if seq_len < 16384 else 0 if seq_len >= 262144 else 1
        cells = [f"{seq_len:,}"]
        for peer in ("cudnn", "flash-attn-4"):
            cells.append(ms(row(file, name=peer, seq_len=seq_len), digits))
        for backend in ("flex", "triton"):
            found = row(file, name=backend, seq_len=seq_len, target_density=0.05)
            cells += [ms(found, 2 if seq_len <= 16384 else 1), f"{found['ratio_to_cudnn']:.3f}"]
        rows.append([*cells, f"{found['selection_ms']:.{2 if seq_len <= 65536 else 1}f}"])
    heads = "tokens | cuDNN | FlashAttention-4 | flex | of cuDNN | triton | of cuDNN | selection"
    return lines(heads, rows)


def attention_by_density() -> list[str]:
    file = "attention_h200_density"
    rows = []
    for density in (0.02, 0.1, 0.2):
        cells = [f"{100 * density:.0f} %"]
        for backend in ("flex", "triton"):
            found = row(file, name=backend, target_density=density)
            cells += [ms(found, 1), f"{found['ratio_to_cudnn']:.3f}"]
        rows.append(cells)
    dense = row(file, name="ours, dense")
    rows.append(["dense, ours", ms(dense, 1), f"{dense['ratio_to_cudnn']:.3f}", "", ""])
    return lines("density | flex | of cuDNN | triton | of cuDNN", rows)


def patterns() -> list[str]:
    """At about equal recall."""
    dense = row("masks_budgets_h200", name="cudnn")
    rows = [["dense, cuDNN", "1", "100 %", "", ms(dense, 0), f"{dense['step_ms']:,.0f}"]]
    independent = "vertical_slash, independent"
    for label, file, name, value in (
        ("vertical_slash, independent, 0.8", "masks_budgets_h200", independent, 0.8),
        ("vertical_slash, independent, 0.9", "masks_budgets_h200", independent, 0.9),
        ("xattention, 0.999", "masks_patterns_h200", "xattention", 0.999),
        ("moba, top 48 of 128 chunks", "masks_patterns_h200", "moba", 48),
    ):
        found = row(file, name=name, value=value)
        kept = [f"{found['recall']:.3f}", f"{100 * found['density']:.1f} %"]
        times = [f"{found['selection_ms']:.1f}", ms(found, 0), f"{found['step_ms']:,.0f}"]
        rows.append([label, *kept, *times])
    return lines("pattern | recall | density | selection | attention | in all", rows)


def masks() -> list[str]:
    file = "masks_kernels_h200"
    rows = []
    for mask, label in (("documents", "packed documents"), ("window", "window of 4,096")):
        cells = [f"{label}, 64:8", ms(row(file, name="flash-attn-4", mask=mask), 2)]
        for backend in ("flex", "triton"):
            found = row(file, name=backend, mask=mask, heads=64)
            cells += [ms(found, 2), f"{found['total_of_flash_attn_4']:.2f}"]
        rows.append(cells)
    return lines("mask, heads of 128 | FlashAttention-4 | auto (flex) | | triton | ", rows)


def loss() -> list[str]:
    rows = []
    for label, name in (
        ("ours", "ours"),
        ("Liger Kernel", "liger"),
        ("cut-cross-entropy, exact", "cut-cross-entropy, exact"),
        ("torch, full logits", "torch, full logits"),
    ):
        found = row("loss_h200", name=name)
        measured = ["out of memory", ""]
        if "ms" in found:
            gib = found["peak_bytes"] / 2**30
            measured = [f"{found['ms']:.1f}", f"{gib:.{1 if gib >= 1 else 2}f}"]
        errors = [f"{found['errors'][of]:.2e}" for of in ("loss", "d_hidden", "d_weight")]
        rows.append([label, *measured, *errors])
    return lines(" | ms | peak GiB | error of loss | d_hidden | d_weight", rows)


# Context parallelism ------------------------------------------------------------------------------


def scaling() -> list[str]:
    """Of attention over four GPUs."""
    rows = []
    for backend, file in (("triton", ""), ("flex", "_flex")):
        for schedule in ("alone", "all_gather", "ring", "double_ring"):
            if (backend, schedule) == ("flex", "double_ring"):
                continue
            found = row(f"context_parallel{file}_4xh200", case="scaling", schedule=schedule)
            label = {"alone": "one GPU alone", "double_ring": "double_ring, 2 x 2"}
            rate = f"{found['visited_tflops']:.0f}"
            of_one = f"{found.get('of_alone', 1):.3f}"
            rows.append([backend, label.get(schedule, schedule), ms(found, 1), rate, of_one])
    return lines("backend | schedule | fwd + bwd | TFLOP/s a GPU | of one GPU", rows)


def nodes() -> list[str]:
    """A ring and a double ring over two pretended nodes."""
    rows = []
    for file, dtype in (("512k", "float32"), ("512k", "bfloat16"), ("1m", "float32")):
        file = f"context_parallel_nodes_2x2_{file}_h200"
        ring = row(file, schedule="ring", gradient_dtype=dtype)
        double = row(file, schedule="double_ring", gradient_dtype=dtype)
        faster = ring["total_ms"] / double["total_ms"]
        cells = [f"{ring['seq_len']:,}", dtype, ms(ring, 1), ms(double, 1), f"{faster:.2f}"]
        rows.append([*cells, ms(double["compute_alone"], 1)])
    heads = "tokens | gradients | ring | double_ring | times faster | computing alone"
    return lines(heads, rows)


def dense_on_four() -> list[str]:
    file = "context_parallel_dense_4xh200"
    ours = row(file, name="ours", layout="zigzag", schedule="ring")
    torchs = row(file, name="torch context_parallel", rotate="allgather")
    rows = []
    for label, found in (("ours, zigzag, ring", ours), ("torch, allgather", torchs)):
        rows.append([label, ms(found, 1), f"{found['total_ms']:.1f}", f"{found['tflops']:.0f}"])
    return lines(" | fwd + bwd | in all | TFLOP/s a GPU", rows)


def documents_on_two() -> list[str]:
    file = "masks_varlen_2xh200"
    torchs = row(file, name="torch context_parallel", rotate="allgather")
    total = f"{torchs['total_ms']:.2f}"
    rows = [["(causal)", "torch, allgather", ms(torchs, 2), total, "", "", ""]]
    for layout, schedule in (
        ("balanced", "group_cast"),
        ("contiguous", "group_cast"),
        ("striped", "all_gather"),
    ):
        found = row(file, name="ours", layout=layout, schedule=schedule)
        megabytes = found["megabytes_sent_forward"] + found["megabytes_sent_backward"]
        cells = [layout, schedule, ms(found, 2), f"{found['total_ms']:.2f}"]
        cells += [f"{found['worker_imbalance']:.3f}", f"{megabytes:.0f}"]
        rows.append([*cells, f"{found['sent_of_needed']:.2f}"])
    heads = "layout | schedule | fwd + bwd | in all | busiest rank / mean | MB sent | of needed"
    return lines(heads, rows)


# Training steps -----------------------------------------------------------------------------------


def speed(logged: list[dict]) -> float:
    """Tokens/s of a GPU, median of the steps after the first, which compiles."""
    return median(step["tokens_per_second_per_device"] for step in logged[1:])


def scaling_of_steps() -> list[str]:
    half_b = result("step_scaling_0_5b_2xh200_third")["runs"]
    three_b = result("step_scaling_3b_2xh200")["runs"]
    triton = result("step_scaling_3b_triton_2xh200")["runs"]
    four = {ranks: speed(row("step_scaling_0_5b_4xh200", ranks=ranks)["steps"]) for ranks in (1, 4)}

    def both(runs: dict, *names: str) -> list[float]:
        return [speed(runs[name]["steps"]) for name in names]

    # Steps 5 to 8 of triton's runs are one line.
    of_triton = [
        triton[name]["steps"][2]["tokens_per_second_per_device"] for name in ("1 GPU", "2 GPUs")
    ]
    rows = []
    for model, backend, (one, several) in (
        ("Qwen2.5-3B, two", "flex", both(three_b, "1 GPU, recomputed", "2 GPUs, recomputed")),
        ("Qwen2.5-3B, two", "triton", of_triton),
        ("Qwen2.5-0.5B, two", "triton", both(half_b, "1 GPU, triton", "2 GPUs, triton")),
        ("Qwen2.5-0.5B, two", "flex", both(half_b, "1 GPU, flex", "2 GPUs, flex")),
        ("Qwen2.5-0.5B, four (an earlier day)", "flex", four.values()),
    ):
        rows.append([model, backend, f"{several:,.0f}", f"{several / one:.3f}"])
    return lines("model, GPUs | backend | tokens/s a GPU | of one GPU", rows)


def parts_of_a_step() -> list[str]:
    part = result("step_parts_0_5b_128k_h200")["runs"]["full"]["trace"]["part_ms"]
    attention = f"{part['attention, forward']:.0f} + {part['attention, backward']:.0f}"
    names = ("linear layers", "loss", "norms, rope, elementwise", "selection")
    cells = [attention, *[f"{part[name]:.0f}" for name in names]]
    cells += [f"{part['FSDP copies'] + part['optimizer']:.0f}", f"{part['idle']:.0f}"]
    heads = "attention, forward + backward | linear layers | loss | elementwise | selection"
    return lines(f"{heads} | FSDP, optimizer | idle", [cells])


# transformers' Trainer ----------------------------------------------------------------------------


def huggingface_steps() -> list[str]:
    arms = ("sdpa", "sdpa, flash", "ours, dense", "ours, dense, kept")
    arms += ("ours, vertical_slash", "ours, vertical_slash, kept")
    found = {
        (row["shape"], row["tokens"], row["arm"]): row for row in result("huggingface_h200")["rows"]
    }
    rows = []
    for shape, tokens in dict.fromkeys((shape, tokens) for shape, tokens, _ in found):
        cells = [shape.upper(), f"{tokens:,}"]
        for arm in arms:
            ran = found.get((shape, tokens, arm))
            gib = f" ({ran['peak_bytes'] / 2**30:.1f})" if ran else ""
            cells.append(f"{ran['step_ms'] / 1e3:.2f}{gib}" if ran else "")
        rows.append(cells)
    return lines(" | ".join(["model", "tokens", *arms]), rows)


def huggingface_packed() -> list[str]:
    found = result("huggingface_packed_2xh200")["rows"]
    rows = []
    for tokens in (65536, 131072):
        dense, sparse = (
            next(row for row in found if (row["attention"], row["tokens"]) == (name, tokens))
            for name in ("dense", "sparse")
        )
        cells = [f"{dense['tokens_per_s']:,.0f}", f"{sparse['tokens_per_s']:,.0f}"]
        rows.append([f"{tokens:,}", *cells, f"{100 * sparse['density']:.1f} %"])
    return lines("tokens | dense, tokens/s | vertical_slash, tokens/s | density", rows)


# The real model -----------------------------------------------------------------------------------


def study() -> list[str]:
    """Training SmolLM2 with each pattern: what is kept, and what it costs."""
    rows = []
    for label, file, name in (
        ("dense", "study_real_h200", "dense"),
        ("default", "study_real_h200", "default"),
        ("window with sinks", "study_real_h200", "window"),
        ("minference", "study_real_h200", "minference"),
        ("published, 0.95", "study_real_h200", "published_95"),
        ("xattention 0.9", "study_real_h200", "xattention"),
    ):
        run = result(file)["runs"][name]
        as_trained = _evaluated(file, name, run["method"])
        as_dense = _evaluated(file, name, "dense")
        kept = as_trained["attention"] if name != "dense" else {"density": 1}
        recall = f"{kept['recall']:.2f}" if kept.get("recall") and name != "window" else ""
        cells = [label, f"{100 * kept['density']:.1f} %", recall]
        cells.append(f"{run['tokens_per_second']:,.0f}")
        base = _held_out(_evaluated(file, "dense", "dense"))
        cells += [f"{_held_out(each) - base:.3f}" for each in (as_trained, as_dense)]
        cells += [_needles(each) for each in (as_trained, as_dense)]
        rows.append(cells)
    heads = "trained with | density | recall | tokens/s | loss above dense | read densely"
    return lines(f"{heads} | needles, 8K / 64K | read densely", rows)


def _evaluated(file: str, name: str, mode: str) -> dict:
    return next(
        one for one in result(file)["evaluations"] if (one["weights"], one["mode"]) == (name, mode)
    )


def _held_out(evaluated: dict) -> float:
    return mean(evaluated["scores"][f"loss, {kind}"] for kind in ("code", "prose", "mixed"))


def _needles(evaluated: dict) -> str:
    scores = evaluated["scores"]
    return f"{scores['needle forced, 8192']:.0f} / {scores['needle forced, 65536']:.0f} %"


def density() -> list[str]:
    """Patterns on SmolLM2's own queries and keys: density at a recall, loss at a density."""
    rows = []
    for label, name in (
        ("best verticals + slashes, all rows known", "best verticals + diagonals"),
        ("`joint`, one local slash", "joint, spread, sinks 4, local 1"),
        ("two local slashes", "joint, spread, sinks 4, local 2"),
        ("and sinks not counted", "joint, behind sinks, local 2"),
        ("and a quarter last rows: the default", "joint, behind sinks, both"),
        ("the same, last rows alone", "joint, behind sinks, last rows"),
        ("independent, as published", "independent"),
        ("xattention", "xattention, stride 16"),
        ("moba", "moba, chunk 128"),
    ):
        at_recall = [_of_texts("at_recall", name, recall) for recall in (0.9, 0.95)]
        cells = [label]
        cells += [f"{100 * mean(at['density'] for at in found):.1f} %" for found in at_recall]
        times = [at["kernel_ms"]["triton"] for at in at_recall[0] if "kernel_ms" in at]
        cells.append(f"{mean(times):.1f}" if times else "")
        at_density = [_of_texts("at_density", name, density) for density in (0.1, 0.15)]
        if at_density[0]:
            cells += [f"{mean(at['above_dense'] for at in found):.3f}" for found in at_density]
            cells.append(f"{100 * mean(at['needles'] for at in at_density[0]):.0f} %")
        rows.append(cells + [""] * (7 - len(cells)))
    heads = "chosen by | density at 0.9 | at 0.95 | ms | loss at 10 % | at 15 % | needles"
    return lines(heads, rows)


def _of_texts(key: str, name: str, value: float) -> list[dict]:
    """What each text says of a pattern at a recall or a density."""
    found = []
    for text in result("density_h200")["texts"].values():
        found += [at for at in text[key] if (at["name"], at[key]) == (name, value)]
    return found


TABLES = {
    table.__name__: table
    for table in (
        headlines,
        attention_by_length,
        attention_by_density,
        patterns,
        masks,
        loss,
        scaling,
        nodes,
        dense_on_four,
        documents_on_two,
        scaling_of_steps,
        parts_of_a_step,
        huggingface_steps,
        huggingface_packed,
        study,
        density,
    )
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
