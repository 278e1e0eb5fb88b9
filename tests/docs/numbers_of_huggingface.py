"""Claims about transformers' Trainer and code: numbers.py says what a claim is."""

from tests.docs.numbers import Claim, result

PAGE = "docs/huggingface.md"
GIB = 2**30
_ARMS = (
    "sdpa",
    "sdpa, flash",
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
    claims = []
    for tokens in (65536, 131072):
        dense, sparse = rows["dense", tokens], rows["sparse", tokens]
        values = (dense["tokens_per_s"], sparse["tokens_per_s"], 100 * sparse["density"])
        claims.append(Claim(PAGE, f"| {tokens:,} | {{:,.0f}} | {{:,.0f}} | {{:.1f}} % |", values))
    seconds = [ms / 1e3 for ms in rows["sparse", 131072]["steps_ms"]]
    of_one = [row["tokens_per_s"] for row in result("huggingface_packed_h200")["rows"]]
    moe = result("moe_qwen3_30b_a3b_2xh200")
    of_experts = (moe["step_seconds"], 100 * moe["mfu"], moe["memory_gib"], moe["expected_gib"])
    gemma = result("gemma3_1b_compiled_h200")["runs"]
    # Steps 5 to 8.
    of_gemma = [gemma[name]["steps"][2]["step_seconds"] for name in ("compiled", "not compiled")]
    return [
        *claims,
        Claim(PAGE, "from {:.2f} to {:.2f} s at 131,072", (min(seconds), max(seconds))),
        Claim(PAGE, "One GPU trains {:,.0f} and {:,.0f} with 32,768", tuple(of_one)),
        Claim(
            PAGE,
            "take {:.2f} s, MFU {:.0f} %, and {:.1f} GiB a GPU ({:.1f} estimated)",
            of_experts,
        ),
        Claim(PAGE, "takes {:.2f} s at 32,768 tokens, not compiled {:.2f} s", tuple(of_gemma)),
    ]


def _adapters() -> Claim:
    found = result("lora_llama3_1_8b_h200")
    short, long = found["rows"]
    values = []
    for row in (long, short):
        values += [row["step_seconds"], row["memory_gib"], row["expected_gib"]]
        values += [100 * row["mfu"], 100 * row["density"]]
    text = (
        "tokens in {:.1f} s a step with {:.1f} GiB ({:.1f} estimated; more of attention is kept than "
        "above), MFU {:.0f} %, {:.0f} % density; 131,072 tokens in {:.1f} s with {:.1f} GiB ({:.1f}), "
        "MFU {:.0f} %, {:.0f} % density. Dense, these take {:.1f} s"
    )
    values.append(found["dense"]["step_seconds"])
    return Claim("docs/finetune.md", text, tuple(values))
