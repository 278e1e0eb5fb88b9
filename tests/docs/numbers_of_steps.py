"""Claims about whole training steps, and what is extrapolated from them: numbers.py says what a claim is."""

from statistics import mean, median
from typing import NamedTuple

from tests.docs.numbers import (
    BENCHMARKS,
    CP_DENSE,
    LENGTH,
    README,
    Claim,
    mean_seconds,
    result,
    row,
    speed,
    steps,
    three_digits,
)

STEP_SHORT = "step_qwen2_5_0_5b_128k_h200"
STEP_LONG = "step_qwen2_5_3b_512k_h200"
STEP_LONGEST = "step_long_2xh200"
SCALING_3B = "step_scaling_3b_2xh200"
SCALING_HALF_B = "step_scaling_0_5b_2xh200_third"
SCALING_4 = "step_scaling_0_5b_4xh200"
SCALING_TRITON = "step_scaling_3b_triton_2xh200"
PARTS = "step_parts_0_5b_128k_h200"
TILES = "tiles_head_dim_64_h200"


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


def scaling_with_triton() -> list[Claim]:
    """In tokens/s, in MFU, and by part of the step."""
    runs = result(SCALING_TRITON)["runs"]
    # The mean of steps 5 to 8.
    one, two = (runs[name]["steps"][2] for name in ("1 GPU", "2 GPUs"))
    key = "tokens_per_second_per_device"
    tokens = (two[key], two[key] / one[key])
    of_one, of_two = (runs[name]["trace"]["part_ms"] for name in ("1 GPU", "2 GPUs"))
    more = {part: of_two[part] - of_one[part] for part in of_one}
    attention = more["attention, forward"] + more["attention, backward"]
    collectives = ("all-gather", "reduce-scatter", "transfers", "collectives")
    not_hidden = sum(ms for part, ms in more.items() if part.endswith(collectives))
    return [
        Claim(BENCHMARKS, "| | triton | {:,.0f} | {:.3f} |", tokens),
        Claim(
            BENCHMARKS,
            "two GPUs had {:.1f} % more pairs a token: in MFU they keep {:.3f}. Of {:.0f} ms more, "
            "attention takes {:.0f}, linear layers beside collectives {:.0f}, transfers that nothing "
            "hides {:.0f}.",
            (
                100 * (2 * two["density"] / one["density"] - 1),
                two["mfu"] / one["mfu"],
                1e3 * (two["step_seconds"] - one["step_seconds"]),
                attention,
                more["linear layers"],
                not_hidden,
            ),
        ),
    ]


def where_a_step_goes() -> list[Claim]:
    runs = result(PARTS)["runs"]
    # The mean of steps 5 to 8.
    of_run = {name: run["steps"][2] for name, run in runs.items() if name != "dense"}

    def speed_of(name: str) -> tuple[float, float]:
        run = of_run[name]
        percent = 100 * run["mfu"]
        return run["step_seconds"], percent

    dense = [step["step_seconds"] for step in runs["dense"]["steps"][1:]]
    first = (100 * of_run["full"]["density"], *speed_of("full, beside selective"))
    second = (of_run["full"]["step_seconds"], *speed_of("none"), of_run["none"]["memory_gib"])
    part = runs["full"]["trace"]["part_ms"]
    parts = (
        part["attention, forward"],
        part["attention, backward"],
        part["linear layers"],
        part["loss"],
        part["norms, rope, elementwise"],
        part["selection"],
        part["FSDP copies"] + part["optimizer"],
        part["idle"],
    )
    tried = result(TILES)["rows"]
    now = [kernel for kernel in tried if kernel["tile"] == "as it is"]
    for kernel in now:
        same = [other["ms"] for other in tried if _same_kernel(other, kernel)]
        assert min(same) > 0.96 * kernel["ms"], "a tile is 4 % faster"
    of_blocks = [kernel["tflops"] for kernel in now if kernel["piece"] != "verticals"]
    return [
        Claim(
            BENCHMARKS,
            "{:.1f} % density, triton. Steps take {:.2f} s, MFU {:.0f} %, with selective "
            "checkpointing {:.2f} s, {:.0f} %; on another host {:.2f} s, and without checkpointing "
            "{:.2f} s, {:.0f} %, {:.0f} GiB. Dense steps take {:.1f} to {:.1f} s",
            (*first, *speed_of("selective"), *second, min(dense), max(dense)),
        ),
        Claim(BENCHMARKS, "A step of {:.2f} s", (runs["full"]["steps"][3]["step_seconds"],)),
        Claim(BENCHMARKS, "| {:.0f} + {:.0f}" + " | {:.0f}" * 6 + " |", parts),
        Claim(
            BENCHMARKS,
            "the forward runs at {} TFLOP/s, dq at {}, dk and dv at {}, and no",
            tuple(of_blocks),
        ),
    ]


def _same_kernel(one: dict, other: dict) -> bool:
    same_name = one["kernel"] == other["kernel"]
    same_piece = one["piece"] == other["piece"]
    return same_name and same_piece


def restart() -> Claim:
    """From a killed rank to the end of the next step, and of the first step of all."""
    found = result("restart_2xh200")
    parts = [
        mean(attempt[name] for attempt in found["rows"])
        for name in ("total", "imports", "first step")
    ]
    text = (
        "{:.1f} s on two H200 (Qwen2.5-0.5B, 32,768 tokens). Imports take\n{:.1f} s of them, "
        "and the first step {:.1f}, as torch's and Triton's caches are warm. "
        "With empty caches the job took {:.1f} s"
    )
    values = (*parts, found["seconds_to_first_step"])
    return Claim("docs/reliability.md", text, values)
