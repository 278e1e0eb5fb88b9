"""Claims about attention and the loss: numbers.py says what a claim is."""

from tests.docs.numbers import (
    BENCHMARKS,
    CONTEXT_PARALLEL,
    CP_DENSE,
    EVALUATION,
    LENGTH,
    README,
    Claim,
    both,
    result,
    row,
)

NEW = "attention_h200"
DENSITY = "attention_h200_density"
LOG = "docs/benchmarks_log.md"
CP4 = "context_parallel_4xh200"
CP4_FLEX = "context_parallel_flex_4xh200"
NODES_512K = "context_parallel_nodes_2x2_512k_h200"
NODES_1M = "context_parallel_nodes_2x2_1m_h200"
KERNELS = "masks_kernels_h200"
VARLEN = "masks_varlen_2xh200"
BUDGETS = "masks_budgets_h200"
PATTERNS = "masks_patterns_h200"
CUDNN = "dense_cudnn_h200"
CP_CUDNN = "context_parallel_dense_cudnn_2xh200"
GATHERED = "masks_gathered_h200"
LOSS = "loss_h200"
MANY = "many_gpus_4xh200"


def attention_by_length() -> list[Claim]:
    claims = []
    for seq_len in (4096, 16384, 65536, 131072, 262144, 524288):
        name = LENGTH if seq_len == 524288 else NEW
        flex = row(name, name="flex", seq_len=seq_len, target_density=0.05)
        triton = row(name, name="triton", seq_len=seq_len, target_density=0.05)
        # Short times have more digits.
        of_dense = 2 if seq_len < 16384 else 0 if seq_len >= 262144 else 1
        of_sparse = 2 if seq_len <= 16384 else 1
        dense = f"{{:.{of_dense}f}} + {{:.{of_dense}f}}"
        sparse = f"{{:.{of_sparse}f}} + {{:.{of_sparse}f}}"
        mark = "**" if seq_len >= 131072 else ""
        ratio = f"{mark}{{:.3f}}{mark}"
        text = f"| {seq_len} | {dense} | {dense} | {sparse} | {ratio} | {sparse} | {ratio} |"
        values = [
            *both(name, name="cudnn", seq_len=seq_len),
            *both(name, name="flash-attn-4", seq_len=seq_len),
        ]
        for backend in (flex, triton):
            values += [backend["forward_ms"], backend["backward_ms"], backend["ratio_to_cudnn"]]
        if name == NEW:
            text += f" {{:.{2 if seq_len <= 65536 else 1}f}} |"
            values.append(flex["selection_ms"])
        claims.append(Claim(BENCHMARKS, text, tuple(values)))
    return [*claims, *_few_tokens(), _where_time_goes()]


def _few_tokens() -> list[Claim]:
    with_selection = {}
    for name in ("flex", "triton", "flash-attn-4"):
        found = row(NEW, name=name, seq_len=4096)
        selection_ms = found.get("selection_ms", 0)
        with_selection[name] = found["forward_ms"] + found["backward_ms"] + selection_ms
    density = 100 * row(NEW, name="flex", seq_len=4096)["density"]
    memory = [
        row(NEW, name="triton", seq_len=seq_len)["peak_extra_of_qkvo"]
        for seq_len in (262144, 131072)
    ]
    before = {}
    for answer in result(NEW)["before"]["break_even"]:
        if answer["sought"] == "seq_len":
            before[answer["backend"]] = answer["seq_len"]
    return [
        Claim(
            BENCHMARKS,
            "At 4,096 tokens, 5 % ({:.1f} % by blocks), it needs {:.2f} ms (flex) and {:.2f} (triton) "
            "with selection, FlashAttention-4 {:.2f}.",
            (density, *with_selection.values()),
        ),
        Claim(BENCHMARKS, "triton {:.2f} at 262144 and {:.2f} at 131072", tuple(memory)),
        Claim(
            LOG,
            "from {:,} (flex) and {:,} (triton) tokens on",
            (before["flex"], before["triton"]),
        ),
    ]


def _where_time_goes() -> Claim:
    spent = {}
    for name in ("flex", "triton"):
        found = row(NEW, name=name, seq_len=131072)
        spent[name] = {kernel["kernel"]: kernel["ms"] for kernel in found["kernels"]}

    def of_flash(*parts: str) -> float:
        total = 0.0
        for kernel, ms in spent["flex"].items():
            if any(part in kernel for part in parts):
                total += ms
        return total

    verticals = ("_query_kernel", "_key_kernel", "_forward_kernel")
    tables = ("_lists_kernel", "_verticals_kernel")
    triton = spent["triton"]
    return Claim(
        LOG,
        "flex: FlashAttention-4 backward {:.1f}, forward {:.1f}, the rest of it {:.1f}; verticals {:.1f}; "
        "block tables {:.1f}. triton: dk and dv {:.1f} (verticals 2.0), dq {:.1f}, forward {:.1f}, "
        "block tables {:.1f}",
        (
            of_flash("bwd_sm90"),
            of_flash("fwd_sm90"),
            of_flash("bwd_preprocess", "bwd_postprocess", "FillFunctor"),
            sum(spent["flex"][kernel] for kernel in verticals),
            sum(spent["flex"][kernel] for kernel in tables),
            triton["_key_kernel"],
            triton["_query_kernel"],
            triton["_forward_kernel"],
            sum(triton[kernel] for kernel in tables),
        ),
    )


def attention_by_density() -> list[Claim]:
    claims = []
    for density in (0.02, 0.1, 0.2):
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
        row(NEW, name=name, seq_len=131072)["visited_tflops"] for name in ("flex", "triton")
    )
    text = "At 131072 that is {:.0f} (flex) and {:.0f} (triton) TFLOP/s"
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
    for name, dtype, short in (
        (NODES_512K, "float32", "fp32"),
        (NODES_512K, "bfloat16", "bf16"),
        (NODES_1M, "float32", "fp32"),
    ):
        ring = both(name, schedule="ring", gradient_dtype=dtype)
        double = both(name, schedule="double_ring", gradient_dtype=dtype)
        seq_len = row(name, schedule="ring")["seq_len"]
        text = f"| {seq_len} | {short} | {{:.1f}} + {{:.1f}} | {{:.1f}} + {{:.1f}} |"
        claims.append(Claim(BENCHMARKS, text, (*ring, *double)))
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
    text = "Ours is {:.3f} times as fast, its kernel alone {:.2f} times."
    kernel = row(LENGTH, name="flash-attn-4", seq_len=262144)["ratio_to_cudnn"]
    values = (torch_row["total_ms"] / ours["total_ms"], 1 / kernel)
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
    text = "| balanced | group_cast | {:.2f} + {:.2f} | **{:.2f}** | {:.3f} |"
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


def cudnn_backend() -> list[Claim]:
    rows = [*result(CUDNN)["rows"], *result(CUDNN)["head_dim_256"]["rows"]]

    def of_sdpa(name: str, seq_len: int, head_dim: int) -> float:
        for found in rows:
            if (found["name"], found["seq_len"], found["head_dim"]) == (name, seq_len, head_dim):
                return found["ratio_to_cudnn"]
        raise KeyError(name)

    shapes = ((65536, 128), (131072, 128), (65536, 256))
    short, long, wide = (of_sdpa("ours, cudnn", *shape) for shape in shapes)
    with_triton = [of_sdpa("ours, triton", *shape) for shape in shapes]
    one_gpu = (
        "needs {:.3f} and {:.3f} of the time of SDPA's cuDNN at 65,536 and 131,072 tokens "
        "(triton {:.2f} and {:.2f}), and {:.3f} at head_dim 256 (triton {:.2f})"
    )
    ours, torchs = result(CP_CUDNN)["rows"]
    [triton, _] = result(CP_CUDNN)["triton"]["rows"]
    [alone] = [
        found["visited_tflops"]
        for found in rows
        if (found["name"], found["seq_len"]) == ("ours, cudnn", 131072)
    ]
    two_gpus = (
        "tokens take {:.0f} ms, with triton {:,.0f}, with torch's `context_parallel` {:.0f}. "
        "The goal was a tenth less than torch,\nbut torch already has {:.0f} of one GPU's {:.0f} TFLOP/s"
    )
    times = (ours["total_ms"], triton["total_ms"], torchs["total_ms"], torchs["tflops"], alone)
    return [
        Claim(BENCHMARKS, one_gpu, (short, long, *with_triton[:2], wide, with_triton[2])),
        Claim(BENCHMARKS, two_gpus, times),
    ]


def patterns() -> list[Claim]:
    claims = []
    independent = "vertical_slash, independent"
    for label, name, chosen, value, digits, mark in (
        ("vertical_slash, independent, 0.8", BUDGETS, independent, 0.8, ".1f", ""),
        ("independent, 0.9", BUDGETS, independent, 0.9, ".1f", ""),
        ("xattention, 0.999", PATTERNS, "xattention", 0.999, ".0f", ""),
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
    at_recall = row(BUDGETS, name=independent, at_recall=0.9)["step_ms"]
    text = "At a recall of 0.9, linear between measurements, vertical_slash takes {:.0f} ms."
    claims.append(Claim(BENCHMARKS, text, (at_recall,)))
    dense = row(BUDGETS, name="cudnn")["step_ms"]
    text = "| {:.0f} ms with selection; dense cuDNN {:,.0f} ms |"
    claims.append(Claim(README, text, (at_recall, dense)))
    return [*claims, *_other_methods_since()]


def _other_methods_since() -> list[Claim]:
    """XAttention's selection by kernels, and MoBA with gathered queries."""
    [chosen] = [
        found
        for found in result("xattention_selection_h200")["rows"]
        if found["tiles"] == "128 x 256, 3 stages"
    ]
    selection = (chosen["total_ms"], chosen["kernels"]["_sums_kernel"])
    moba = row(GATHERED, name="moba, chunks of 512")
    whole = (
        100 * moba["density"],
        moba["recall"],
        moba["total_ms"],
        moba["by_blocks_total_ms"],
        moba["dense_x_density_ms"],
        moba["of_dense_x_density"],
    )
    parts = result(GATHERED)["parts"]
    # Two matrix products of the forward, three of dq, four of dk and dv.
    pairs = 10.99e6 * 512
    rates = [
        pairs * 128 * 2 * products / parts[name] / 1e9
        for name, products in (("forward_ms", 2), ("dq_ms", 3), ("dk_dv_ms", 4))
    ]
    return [
        Claim(
            BENCHMARKS, "xattention chooses in {:.0f} ms, of which products take {:.0f}", selection
        ),
        Claim(
            BENCHMARKS,
            "(density {:.1f} %, recall {:.2f}), attention takes {:.1f} ms, by\nblocks {:.1f}. "
            "Dense triton times the density is {:.1f} ms: {:.1f} times",
            whole,
        ),
        Claim(BENCHMARKS, "run at {:.0f}, {:.0f}, and {:.0f} TFLOP/s", tuple(rates)),
    ]


def loss() -> list[Claim]:
    claims = []
    for label, name in (
        ("ours", "ours"),
        ("Liger Kernel", "liger"),
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
    flex, triton = (row(NEW, name=name, seq_len=131072) for name in ("flex", "triton"))
    flash = row(NEW, name="flash-attn-4", seq_len=131072)["ratio_to_cudnn"]
    all_gather, ring = (
        row(CP4, case="scaling", schedule=name)["of_alone"] for name in ("all_gather", "ring")
    )
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
        Claim(README, "selection ({:.1f} ms) not included", (flex["selection_ms"],)),
        Claim(
            README, "**{:.3f}** of one GPU's speed (all_gather), {:.3f} (ring)", (all_gather, ring)
        ),
        Claim(
            CONTEXT_PARALLEL,
            "`all_gather`: {:.2f} of one GPU's speed on four H200, against {:.2f}",
            (all_gather, ring),
        ),
        Claim(
            EVALUATION,
            "Recording one step took {:.0f} ms with Qwen2.5-0.5B's shape at 65,536 tokens on an "
            "H200: {:.1f} % of the run at `log_every = 10` (the default), {:.0f} % at 1.",
            (1e3 * recording, 100 * recording / (10 * step), 100 * recording / step),
        ),
    ]


def many_gpus() -> list[Claim]:
    parts = result(MANY)["parts"]
    rows = parts["masks_4x_65536"]["rows"]
    torchs = next(row for row in rows if row.get("rotate") == "allgather")
    ours = next(row for row in rows if row["mask"] == "documents" and row["layout"] == "balanced")
    rates = [row[f"{way}_tflops"] for row in (ours, torchs) for way in ("forward", "backward")]

    kept = []
    for schedule in ("all_gather", "ring"):
        for backend in ("flex", "triton"):
            rows = parts[f"scaling_4x_1048576_{backend}"]["rows"]
            kept.append(next(row for row in rows if row["schedule"] == schedule)["of_alone"])
    dense = [row["total_ms"] for row in parts["dense_4x_1048576"]["rows"]]
    shorter = []
    for ranks in (2, 4):
        rows = parts[f"scaling_{ranks}x_524288_flex"]["rows"]
        for schedule in ("all_gather", "ring"):
            shorter.append(next(row for row in rows if row["schedule"] == schedule)["of_alone"])
    return [
        Claim(
            BENCHMARKS,
            "packed documents reach {:.0f} + {:.0f} TFLOP/s a GPU (torch's causal mask: {:.0f} + {:.0f}).",
            tuple(rates),
        ),
        Claim(
            BENCHMARKS,
            "all_gather keeps {:.3f} of one GPU (flex) and {:.3f} (triton), a ring {:.3f} and {:.3f}; "
            "a dense ring takes {:,.0f} ms, torch {:,.0f}.",
            (*kept, *dense),
        ),
        Claim(
            BENCHMARKS,
            "flex keeps {:.3f} by all_gather and {:.3f} by a ring on two, {:.3f} and {:.3f} on four.",
            tuple(shorter),
        ),
    ]
