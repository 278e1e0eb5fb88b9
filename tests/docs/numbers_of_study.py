"""Claims about the study on the real model: numbers.py says what a claim is."""

from statistics import mean

from tests.docs.numbers import README, Claim, result

STUDY = "docs/study.md"
_ROWS = {
    "dense": "dense",
    "`layer`": "default_95",
    "published, 0.95": "published_95",
    "xattention 0.9": "xattention",
}
"""From a row of the page to a run."""


def study() -> list[Claim]:
    found = result("study_real_h200")
    evaluated = {(one["weights"], one["mode"]): one for one in found["evaluations"]}
    dense = _loss(evaluated["dense", "dense"])
    claims = [Claim(STUDY, "above dense ({:.3f})", (dense,))]
    headline = []
    for shown, name in _ROWS.items():
        trained = evaluated[name, name]
        read_densely = evaluated[name, "dense"]
        attention = trained["attention"]
        speed = found["runs"][name]["tokens_per_second"]
        needles = (*_needles(trained), *_needles(read_densely))
        row = f"| {shown} | "
        if name == "dense":
            row += "100 % | | {:,.0f} | 0 | 0 | {:.0f} / {:.0f} % | {:.0f} / {:.0f} % |"
            claims.append(Claim(STUDY, row, (speed, *needles)))
            continue
        costs = (_loss(trained) - dense, _loss(read_densely) - dense)
        kept = (100 * attention["density"], attention["recall"])
        row += "{:.1f} % | {:.2f} | {:,.0f} | {:.3f} | {:.3f} | {:.0f} / {:.0f} % | {:.0f} / {:.0f} % |"
        claims.append(Claim(STUDY, row, (*kept, speed, *costs, *needles)))
        headline.insert(0, (costs[0], *kept))
    text = (
        "xattention {:.3f} ({:.0f} % density, recall {:.2f}), published {:.3f} ({:.0f} %, {:.2f}), "
        "`layer` {:.3f} ({:.0f} %, {:.2f})"
    )
    values = tuple(value for row in headline for value in row)
    return [*claims, Claim(README, text, values)]


def _loss(evaluation: dict) -> float:
    """On held-out text, mean of its kinds."""
    scores = evaluation["scores"]
    return mean(scores[f"loss, {kind}"] for kind in ("code", "prose", "mixed"))


def _needles(evaluation: dict) -> tuple[float, float]:
    """Right tokens of needles at the shortest sparse length and at the longest, %."""
    scores = evaluation["scores"]
    return scores["needle forced, 8192"], scores["needle forced, 65536"]
