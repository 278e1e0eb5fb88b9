"""Numbers of README and docs/, each with the result file that it comes from.

A claim is a piece of a page with a place for each number, {:.1f} as str.format() takes it, and the
numbers as they follow from benchmarks/results. Line breaks and runs of spaces in a page do not
count. tests/docs/test_numbers.py fills the numbers in and looks for the piece.
"""

import functools
import json
from statistics import median
from typing import Any, NamedTuple

from tests.docs.pages import ROOT

README = "README.md"
BENCHMARKS = "docs/benchmarks.md"
EVALUATION = "docs/evaluation.md"
CONTEXT_PARALLEL = "docs/context_parallel.md"

LENGTH = "attention_h200_length"
DENSITY = "attention_h200_density"
HEADS = "attention_h200_heads"
CP4 = "context_parallel_4xh200"
CP4_FLEX = "context_parallel_flex_4xh200"
CP_DENSE = "context_parallel_dense_4xh200"
NODES_512K = "context_parallel_nodes_2x2_512k_h200"
NODES_1M = "context_parallel_nodes_2x2_1m_h200"
KERNELS = "masks_kernels_h200"
VARLEN = "masks_varlen_2xh200"
BUDGETS = "masks_budgets_h200"
PATTERNS = "masks_patterns_h200"
STEP_SHORT = "step_qwen2_5_0_5b_128k_h200"
STEP_LONG = "step_qwen2_5_3b_512k_h200"
STEP_LONGEST = "step_long_2xh200"
SCALING_3B = "step_scaling_3b_2xh200"
SCALING_HALF_B = "step_scaling_0_5b_2xh200_third"
SCALING_4 = "step_scaling_0_5b_4xh200"
LOSS = "loss_h200"


class Claim(NamedTuple):
    """page: from the root. text: a piece of it with places for numbers. values: the numbers."""

    page: str
    text: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@functools.cache
def result(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def row(file: str, /, **wanted: object) -> dict[str, Any]:
    """The first row of a result file that has these values."""
    for candidate in result(file)["rows"]:
        if all(candidate.get(key) == value for key, value in wanted.items()):
            return candidate
    raise LookupError(f"{file} has no row with {wanted}")


def both(file: str, /, **wanted: object) -> tuple[float, float]:
    """ms of a row's forward and backward."""
    found = row(file, **wanted)
    return found["forward_ms"], found["backward_ms"]


def steps(name: str, run: str) -> list[dict[str, Any]]:
    """The logged steps of a run but the first, which compiles."""
    found = result(name)
    if "runs" in found:
        return found["runs"][run]["steps"][1:]
    return row(name, name=run)["steps"][1:]


def mean_seconds(name: str, run: str) -> float:
    logged = [step["step_seconds"] for step in steps(name, run)]
    return sum(logged) / len(logged)


def three_digits(number: float) -> int:
    """The number to three significant digits."""
    return int(float(f"{number:.3g}"))


def speed(logged: list[dict[str, Any]]) -> float:
    """Tokens/s of a GPU."""
    return median(step["tokens_per_second_per_device"] for step in logged)


def attention_by_length() -> list[Claim]:
    claims = []
    for seq_len in (16384, 65536, 131072, 262144, 524288):
        name = DENSITY if seq_len == 131072 else LENGTH
        decimals = 0 if seq_len >= 262144 else 1
        dense = f"{{:.{decimals}f}} + {{:.{decimals}f}}"
        flex = row(name, name="flex", seq_len=seq_len, target_density=0.05)
        triton = row(name, name="triton", seq_len=seq_len, target_density=0.05)
        mark = "**" if seq_len >= 131072 else ""
        ratio = f"{mark}{{:.3f}}{mark}"
        claims.append(
            Claim(
                BENCHMARKS,
                f"| {seq_len} | {dense} | {dense} | {{:.1f}} + {{:.1f}} | {ratio} "
                f"| {{:.1f}} + {{:.1f}} | {ratio} |",
                (
                    *both(name, name="cudnn", seq_len=seq_len),
                    *both(name, name="flash-attn-4", seq_len=seq_len),
                    flex["forward_ms"],
                    flex["backward_ms"],
                    flex["ratio_to_cudnn"],
                    triton["forward_ms"],
                    triton["backward_ms"],
                    triton["ratio_to_cudnn"],
                ),
            )
        )
    return claims


def attention_by_density() -> list[Claim]:
    claims = []
    for density in (0.02, 0.05, 0.1, 0.2):
        flex = row(DENSITY, name="flex", target_density=density)
        triton = row(DENSITY, name="triton", target_density=density)
        values = []
        for backend in (flex, triton):
            values += [backend["forward_ms"], backend["backward_ms"], backend["ratio_to_cudnn"]]
        text = f"| {100 * density:.0f} % | {{:.1f}} + {{:.1f}} | {{:.3f}} | {{:.1f}} + {{:.1f}} | {{:.3f}} |"
        claims.append(Claim(BENCHMARKS, text, tuple(values)))
    dense = row(DENSITY, name="ours, dense")
    text = "| dense, ours | {:.1f} + {:.1f} | {:.3f} |"
    values = (dense["forward_ms"], dense["backward_ms"], dense["ratio_to_cudnn"])
    claims.append(Claim(BENCHMARKS, text, values))
    flex, triton = (
        row(DENSITY, name=name, target_density=0.05)["visited_tflops"]
        for name in ("flex", "triton")
    )
    text = "At 5 % that is {:.0f} (flex) and {:.0f} (triton) TFLOP/s"
    claims.append(Claim(BENCHMARKS, text, (flex, triton)))
    return claims


def context_parallel() -> list[Claim]:
    claims = []
    texts = {
        (CP4, "alone"): "| triton | one GPU alone | {:.1f} + {:.1f} | {:.0f} | 1 |",
        (CP4, "all_gather"): "| | all_gather | {:.1f} + {:.1f} | {:.0f} | **{:.3f}** |",
        (CP4, "ring"): "| | ring | {:.1f} + {:.1f} | {:.0f} | {:.3f} |",
        (CP4, "double_ring"): "| | double_ring, 2 x 2 | {:.1f} + {:.1f} | {:.0f} | {:.3f} |",
        (CP4_FLEX, "alone"): "| flex | one GPU alone | {:.1f} + {:.1f} | {:.0f} | 1 |",
        (CP4_FLEX, "all_gather"): "| | all_gather | {:.1f} + {:.1f} | {:.0f} | **{:.3f}** |",
        (CP4_FLEX, "ring"): "| | ring | {:.1f} + {:.1f} | {:.0f} | {:.3f} |",
    }
    for (name, schedule), text in texts.items():
        found = row(name, case="scaling", schedule=schedule)
        values = [found["forward_ms"], found["backward_ms"], found["visited_tflops"]]
        if schedule != "alone":
            values.append(found["of_alone"])
        claims.append(Claim(BENCHMARKS, text, tuple(values)))
    for name in (NODES_512K, NODES_1M):
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
            ring = row(name, schedule="ring", gradient_dtype=dtype)
            double = row(name, schedule="double_ring", gradient_dtype=dtype)
            claims.append(
                Claim(
                    BENCHMARKS,
                    f"| {ring['seq_len']} | {short} | {{:.1f}} + {{:.1f}} | {{:.1f}} + {{:.1f}} |",
                    (
                        ring["forward_ms"],
                        ring["backward_ms"],
                        double["forward_ms"],
                        double["backward_ms"],
                    ),
                )
            )
    torch_row = row(CP_DENSE, name="torch context_parallel", rotate="allgather")
    ours = row(CP_DENSE, name="ours", layout="zigzag", schedule="ring")
    for label, found, mark in (
        ("ours, zigzag, ring", ours, "**"),
        ("torch, allgather", torch_row, ""),
    ):
        text = f"| {label} | {{:.1f}} + {{:.1f}} | {mark}{{:.1f}}{mark} | {{:.0f}} |"
        values = (
            found["forward_ms"],
            found["backward_ms"],
            found["total_ms"],
            found["tflops"],
        )
        claims.append(Claim(BENCHMARKS, text, values))
    text = (
        "Ours is {:.3f} times as fast. Its kernel alone is {:.2f} times: on one GPU, "
        "FlashAttention-4 takes {:.3f} of cuDNN's time"
    )
    kernel = row(LENGTH, name="flash-attn-4", seq_len=262144)["ratio_to_cudnn"]
    values = (torch_row["total_ms"] / ours["total_ms"], 1 / kernel, kernel)
    claims.append(Claim(BENCHMARKS, text, values))
    return claims


def masks() -> list[Claim]:
    claims = []
    for mask, label in (("documents", "packed documents"), ("window", "window of 4,096")):
        values = [*both(KERNELS, name="flash-attn-4", mask=mask)]
        for backend in ("flex", "triton"):
            found = row(KERNELS, name=backend, mask=mask, heads=64)
            values += [found["forward_ms"], found["backward_ms"], found["total_of_flash_attn_4"]]
        text = (
            f"| {label}, 64:8 | {{:.2f}} + {{:.2f}} | {{:.2f}} + {{:.2f}} | **{{:.2f}}** "
            "| {:.2f} + {:.2f} | {:.2f} |"
        )
        claims.append(Claim(BENCHMARKS, text, tuple(values)))

    torch_row = row(VARLEN, name="torch context_parallel", rotate="allgather")
    ours = row(VARLEN, name="ours", layout="balanced", schedule="group_cast", overlap_stages=1)
    claims.append(
        Claim(
            BENCHMARKS,
            "the causal mask, {:.2f} times as many pairs. group_cast takes 1 / {:.2f} of its time",
            (torch_row["pairs"] / ours["pairs"], torch_row["total_ms"] / ours["total_ms"]),
        )
    )
    text = "| balanced | group_cast, 1 stage | {:.2f} + {:.2f} | **{:.2f}** | {:.3f} |"
    values = (
        ours["forward_ms"],
        ours["backward_ms"],
        ours["total_ms"],
        ours["worker_imbalance"],
    )
    claims.append(Claim(BENCHMARKS, text, values))
    text = "| (causal) | torch, allgather | {:.2f} + {:.2f} | {:.2f} |"
    values = (torch_row["forward_ms"], torch_row["backward_ms"], torch_row["total_ms"])
    claims.append(Claim(BENCHMARKS, text, values))
    return claims


def patterns() -> list[Claim]:
    claims = []
    independent = "vertical_slash, independent"
    joint = "vertical_slash, joint"
    for label, name, chosen, value, digits, mark in (
        ("vertical_slash, independent, 0.8", BUDGETS, independent, 0.8, ".1f", ""),
        ("independent, 0.9", BUDGETS, independent, 0.9, ".1f", ""),
        ("independent, 0.95", BUDGETS, independent, 0.95, ".1f", ""),
        ("joint, 0.85", BUDGETS, joint, 0.85, ".1f", "**"),
        ("joint, 0.9", BUDGETS, joint, 0.9, ".1f", ""),
        ("joint, 0.98", BUDGETS, joint, 0.98, ".1f", ""),
        ("xattention, 0.9", PATTERNS, "xattention", 0.9, ".0f", ""),
        ("xattention, 0.999", PATTERNS, "xattention", 0.999, ".0f", ""),
        ("moba, top 12", PATTERNS, "moba", 12, ".0f", ""),
        ("moba, top 48 of 128 chunks", PATTERNS, "moba", 48, ".0f", ""),
    ):
        found = row(name, name=chosen, value=value)
        claims.append(
            Claim(
                BENCHMARKS,
                f"| {label} | {{:.3f}} | {{:.1f}} % | {{:{digits}}} "
                f"| {{:,.0f}} + {{:,.0f}} | {mark}{{:,.0f}}{mark} |",
                (
                    found["recall"],
                    100 * found["density"],
                    found["selection_ms"],
                    found["forward_ms"],
                    found["backward_ms"],
                    found["step_ms"],
                ),
            )
        )
    at_recall = [
        row(BUDGETS, name=name, at_recall=recall)["step_ms"]
        for recall in (0.9, 0.95)
        for name in (independent, joint)
    ]
    text = "independent {:.0f} ms, joint {:.0f}. At 0.95: {:.0f} and {:,.0f}."
    claims.append(Claim(BENCHMARKS, text, tuple(at_recall)))
    dense = row(BUDGETS, name="cudnn")["step_ms"]
    text = "| {:.0f} ms with selection; dense cuDNN {:,.0f} ms |"
    claims.append(Claim(README, text, (at_recall[0], dense)))
    return claims


class Extrapolated(NamedTuple):
    """Seconds of steps of Qwen2.5-3B with all of its 36 layers, of which dense ones were not timed.

    keeping: a dense step that does not compute attention's forward a second time.
    """

    sparse: float
    dense: float
    keeping: float


def parts_of_512k() -> tuple[float, float, float]:
    """Seconds of a sparse layer, of a dense one, and of all that is no layer, at 524,288 tokens.

    From 36 and 4 sparse layers, and 4 dense ones.
    """
    four_sparse = mean_seconds(STEP_LONG, "sparse3b_4layers")
    sparse_layer = (mean_seconds(STEP_LONG, "sparse3b") - four_sparse) / 32
    rest = four_sparse - 4 * sparse_layer
    dense_layer = (mean_seconds(STEP_LONG, "dense3b_4layers") - rest) / 4
    return sparse_layer, dense_layer, rest


def forward_of_512k() -> float:
    """Seconds of dense attention's forward in one layer."""
    return row(LENGTH, name="flash-attn-4", seq_len=524288)["forward_ms"] / 1e3


def steps_of_512k() -> Extrapolated:
    _, dense_layer, rest = parts_of_512k()
    dense = 36 * dense_layer + rest
    sparse = mean_seconds(STEP_LONG, "sparse3b")
    return Extrapolated(sparse, dense, dense - 36 * forward_of_512k())


def forward_of_1m() -> float:
    """Seconds of dense attention's forward over two GPUs: 16 times the pairs of 262,144 tokens on
    half as many GPUs."""
    quarter = row(CP_DENSE, name="ours", layout="zigzag", schedule="ring")["forward_ms"] / 1e3
    return 16 * 2 * quarter


def steps_of_1m() -> Extrapolated:
    """From 36 sparse layers and one dense one."""
    sparse = mean_seconds(STEP_LONGEST, "Qwen2.5-3B, vertical_slash")
    one_dense = mean_seconds(STEP_LONGEST, "Qwen2.5-3B, one layer, dense")
    rest = parts_of_512k()[2]  # over two GPUs each has as many tokens
    dense = one_dense + 35 * (one_dense - rest)
    return Extrapolated(sparse, dense, dense - 36 * forward_of_1m())


def whole_steps() -> list[Claim]:
    short = steps_of_512k()
    long = steps_of_1m()
    times = [each.dense / each.sparse for each in (short, long)] + [
        each.keeping / each.sparse for each in (short, long)
    ]
    sparse_layer, dense_layer, rest = parts_of_512k()
    claims = [
        Claim(
            README,
            "one GPU | {:.0f} s; **{:.1f} times** faster than dense ({:.1f}, if dense keeps",
            (short.sparse, times[0], times[2]),
        ),
        Claim(
            README,
            "two GPUs | {:.0f} s; **{:.1f} times** faster than dense ({:.1f}) |",
            (long.sparse, times[1], times[3]),
        ),
        Claim(
            BENCHMARKS,
            "a sparse layer takes {:.2f} s, a dense one {:.1f} s, and the rest {:.1f} s, so a "
            "dense step takes {:.0f} s: sparse is **{:.1f} times** faster.",
            (sparse_layer, dense_layer, rest, short.dense, times[0]),
        ),
        Claim(
            BENCHMARKS,
            "one dense layer gives a step of {:.0f} s: **{:.1f} times**.",
            (long.dense, times[1]),
        ),
        Claim(
            BENCHMARKS,
            "saves 36 forwards ({:.2f} s, and {:.2f} s at 1M by the dense table above): {:.1f} "
            "and {:.1f} times.",
            (forward_of_512k(), forward_of_1m(), times[2], times[3]),
        ),
    ]
    return claims + table_of_steps()


def table_of_steps() -> list[Claim]:
    claims = []
    for label, options in (
        ("| dense, flex", "--attention.pattern dense"),
        ("| vertical_slash, flex", "--attention.backend flex"),
        ("| vertical_slash, triton", "--attention.backend triton"),
    ):
        found = row(STEP_SHORT, options=options)
        text = f"{label} | {{}} | {{:,}} | {{:.0f}} % | {{:.1f}} |"
        seconds = [131072 / speed for speed in found["tokens_per_second"]]
        shown = f"{min(seconds):.2f} - {max(seconds):.2f}"
        if "dense" in options:
            shown = f"{sum(seconds) / 4:.1f}"
        tokens = three_digits(median(found["tokens_per_second"]))
        values = (shown, tokens, median(found["mfu"]), found["memory_gib"])
        claims.append(Claim(BENCHMARKS, text, values))
    long = steps(STEP_LONG, "sparse3b")
    claims.append(
        Claim(
            BENCHMARKS,
            "| vertical_slash, flex | {:.1f} - {:.1f} | {:,} | {:.0f} % | {:.1f} (78.0) |",
            (
                long[1]["step_seconds"],
                long[0]["step_seconds"],
                three_digits(speed(long)),
                100 * long[1]["mfu"],
                long[1]["memory_gib"],
            ),
        )
    )
    for run, text in (
        (
            "Qwen2.5-3B, vertical_slash",
            "| **{:.1f}** | {:,} | {:.0f} % | {:.1f} ({:.1f}) | {:.1f} % |",
        ),
        (
            "Qwen2.5-3B, one layer, dense",
            "| {:.1f} | {:,} | {:.0f} % | {:.1f} ({:.1f}) | {:.0f} % |",
        ),
        (
            "Llama-3.1-8B, vertical_slash",
            "| **{:.1f}** | {:,} | {:.0f} % | {:.1f} ({:.1f}) | {:.1f} % |",
        ),
    ):
        [last] = steps(STEP_LONGEST, run)
        expected = result(STEP_LONGEST)["runs"][run]["expected_gib"]
        values = (
            last["step_seconds"],
            three_digits(2 * speed([last])),
            100 * last["mfu"],
            last["memory_gib"],
            expected,
            100 * last["density"],
        )
        claims.append(Claim(BENCHMARKS, text, values))
    return claims


def scaling_of_steps() -> list[Claim]:
    claims = []
    for label, name, one, several, mark in (
        ("| Qwen2.5-3B, two | flex", SCALING_3B, "1 GPU, recomputed", "2 GPUs, recomputed", "**"),
        (
            "attention kept, `reshard_after_forward = false` | flex",
            SCALING_3B,
            "1 GPU, kept",
            "2 GPUs, kept",
            "",
        ),
        ("| Qwen2.5-0.5B, two | triton", SCALING_HALF_B, "1 GPU, triton", "2 GPUs, triton", ""),
        ("| | flex", SCALING_HALF_B, "1 GPU, flex", "2 GPUs, flex", ""),
    ):
        alone = speed(steps(name, one))
        shared = speed(steps(name, several))
        text = f"{label} | {{:,.0f}} | {mark}{{:.3f}}{mark} |"
        claims.append(Claim(BENCHMARKS, text, (shared, shared / alone)))
    alone, shared = (speed(row(SCALING_4, ranks=ranks)["steps"][1:]) for ranks in (1, 4))
    four = (shared, shared / alone)
    text = "| Qwen2.5-0.5B, four (an earlier day) | flex | {:,.0f} | {:.3f} |"
    claims.append(Claim(BENCHMARKS, text, four))
    text = (
        "two GPUs, Qwen2.5-3B: {:,.0f} tokens/s a GPU, **{:.3f}** of one; four GPUs, "
        "Qwen2.5-0.5B: {:,.0f}, {:.3f} |"
    )
    claims.append(Claim(README, text, (*claims[0].values, *four)))
    return claims


def loss() -> list[Claim]:
    claims = []
    for label, name in (
        ("ours", "ours"),
        ("Liger Kernel", "liger"),
        ("Liger Kernel, fp32 dW, our chunks", "liger, fp32 d_weight, our chunks"),
        ("cut-cross-entropy, exact", "cut-cross-entropy, exact"),
    ):
        found = row(LOSS, name=name)
        gib = found["peak_bytes"] / 2**30
        digits = 1 if gib >= 1 else 2
        text = f"| {label} | {{:.1f}} | {{:.{digits}f}} |"
        claims.append(Claim(BENCHMARKS, text, (found["ms"], gib)))
    return claims


def headlines() -> list[Claim]:
    """The first rows of README's table, and what stands in the text of other pages."""
    flex, triton = (row(DENSITY, name=name, target_density=0.05) for name in ("flex", "triton"))
    flash = row(DENSITY, name="flash-attn-4")["ratio_to_cudnn"]
    all_gather, ring = (
        row(CP4, case="scaling", schedule=name)["of_alone"] for name in ("all_gather", "ring")
    )
    shares = [
        abs(result("study_short_h200")["differences"][f"vertical_slash_{name} to dense"]["final"])
        for name in ("90", "95", "95_joint")
    ]
    runs = result("recording_0_5b_h200")["runs"]
    spent = {}
    for name, run in runs.items():
        logged = run["steps"][:-1]
        intervals = zip(logged, logged[1:])
        spent[name] = sum(b["step_seconds"] * (b["step"] - a["step"]) for a, b in intervals)
    recording = (spent["every"] - spent["rarely"]) / 3  # steps 10, 20, 30
    step = spent["rarely"] / 39
    return [
        Claim(
            README,
            "**{:.3f}** of dense cuDNN's time (flex), **{:.3f}** (triton); FlashAttention-4, "
            "dense: {:.2f}",
            (flex["ratio_to_cudnn"], triton["ratio_to_cudnn"], flash),
        ),
        Claim(
            README, "**{:.3f}** of one GPU's speed (all_gather), {:.3f} (ring)", (all_gather, ring)
        ),
        Claim(
            CONTEXT_PARALLEL,
            "`all_gather`: {:.2f} of one GPU's speed on four H200, against {:.2f}",
            (all_gather, ring),
        ),
        Claim(README, "| within {:.1f} % |", (100 * max(shares),)),
        Claim(
            EVALUATION,
            "Recording one step took {:.0f} ms with Qwen2.5-0.5B's shape at 65,536 tokens on an "
            "H200: {:.1f} % of the run at `log_every = 10` (the default), {:.0f} % at 1.",
            (1e3 * recording, 100 * recording / (10 * step), 100 * recording / step),
        ),
    ]


def all_claims() -> list[Claim]:
    return [
        *headlines(),
        *attention_by_length(),
        *attention_by_density(),
        *context_parallel(),
        *masks(),
        *patterns(),
        *whole_steps(),
        *scaling_of_steps(),
        *loss(),
    ]
