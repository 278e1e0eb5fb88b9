"""Claims about transformers' Trainer and code: numbers.py says what a claim is."""

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
    return [*claims, Claim(PAGE, text, seconds)]
