"""Claims about transformers' Trainer and code: numbers.py says what a claim is."""

from statistics import mean

from tests.docs.numbers import Claim, result

PAGE = "docs/huggingface.md"
GIB = 2**30
_ARMS = (
    "sdpa",
    "ours, dense",
    "ours, dense, kept",
    "ours, vertical_slash",
    "ours, vertical_slash, kept",
)


def huggingface() -> list[Claim]:
    rows = {
        (row["shape"], row["tokens"], row["arm"]): row for row in result("huggingface_h200")["rows"]
    }
    claims = []
    for shape, tokens in dict.fromkeys((shape, tokens) for shape, tokens, _ in rows):
        text = f"| {tokens:,} |"
        values = []
        for arm in _ARMS:
            row = rows.get((shape, tokens, arm))
            text += " {:.2f} ({:.1f}) |" if row else " |"
            if row:
                values += [row["step_ms"] / 1e3, row["peak_bytes"] / GIB]
        claims.append(Claim(PAGE, text, tuple(values)))

    densities = [100 * row["density"] for row in rows.values() if row.get("density", 1) < 1]
    text = "vertical_slash computes {:.0f} to {:.0f} % of the pairs."
    claims.append(Claim(PAGE, text, (min(densities), max(densities))))

    more = []
    for (shape, tokens, arm), row in rows.items():
        if arm == "ours, dense":
            more.append(100 * (row["step_ms"] / rows[shape, tokens, "sdpa"]["step_ms"] - 1))
    text = "the adapter takes {:.1f} to {:.1f} % more than sdpa"
    claims.append(Claim(PAGE, text, (min(more), max(more))))

    runs = result("transformers_code_h200")["runs"]
    text = "takes {:.2f} s a step through transformers' code, and {:.2f} s natively"
    seconds = tuple(runs[name]["step_seconds"] for name in ("transformers", "native"))
    return [*claims, Claim(PAGE, text, seconds), *_over_two_gpus(), _adapters()]


def _over_two_gpus() -> list[Claim]:
    rows = {
        (row["attention"], row["tokens"]): row
        for row in result("huggingface_packed_2xh200")["rows"]
    }
    dense, sparse = rows["dense", 65536], rows["sparse", 65536]
    text = (
        "{:,.0f} tokens/s dense (65,536 tokens a step, {:.1f} GiB a GPU), {:,.0f} with 131,072, "
        "and {:,.0f} with vertical_slash at {:.1f} % density"
    )
    packed = (
        dense["tokens_per_s"],
        dense["peak_bytes"] / GIB,
        rows["dense", 131072]["tokens_per_s"],
        sparse["tokens_per_s"],
        100 * sparse["density"],
    )
    moe = result("moe_qwen3_30b_a3b_2xh200")
    of_experts = (moe["step_seconds"], 100 * moe["mfu"], moe["memory_gib"], moe["expected_gib"])
    return [
        Claim(PAGE, text, packed),
        Claim(
            PAGE,
            "the last two of five ran at {:,.0f}",
            (1e3 * 65536 / mean(sparse["steps_ms"][-2:]),),
        ),
        Claim(
            PAGE,
            "take {:.2f} s, MFU {:.0f} %, and {:.1f} GiB a GPU ({:.1f} estimated)",
            of_experts,
        ),
    ]


def _adapters() -> Claim:
    short, long = result("lora_llama3_1_8b_h200")["rows"]
    values = []
    for row in (long, short):
        values += [row["step_seconds"], row["memory_gib"], row["expected_gib"]]
        values += [100 * row["mfu"], 100 * row["density"]]
    text = (
        "tokens in {:.1f} s a step with {:.1f} GiB ({:.1f} estimated; more of attention is kept than "
        "above), MFU {:.0f} %, {:.0f} % density; 131,072 tokens in {:.1f} s with {:.1f} GiB ({:.1f}), "
        "MFU {:.0f} %, {:.0f} % density"
    )
    return Claim("docs/finetune.md", text, tuple(values))
