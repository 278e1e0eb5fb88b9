"""Claims about the study on the real model: numbers.py says what a claim is."""

from statistics import mean

from tests.docs.numbers import README, Claim, result

STUDY = "docs/study.md"
NOW = "study_real_h200"
_ROWS = {
    "dense": (NOW, "dense"),
    "default": (NOW, "default"),
    "window with sinks": (NOW, "window"),
    "minference": (NOW, "minference"),
    "published, 0.95": (NOW, "published_95"),
    "xattention 0.9": (NOW, "xattention"),
    "`layer`": ("study_layer_h200", "default_95"),
}
"""From a row of the page to a file and its run."""


def study() -> list[Claim]:
    claims = [_row(shown, *of) for shown, of in _ROWS.items()]
    claims.append(Claim(STUDY, "dense ({:.3f})", (_loss(NOW, "dense", "dense"),)))

    of_host = result(NOW)["joined"]["dense"]["tokens_per_second"]
    claims.append(Claim(STUDY, "with dense at {:,.0f} tokens/s", (of_host,)))

    seeds = []
    for seed in ("", "_seed1", "_seed2"):
        dense = _loss(NOW, f"dense{seed}", "dense")
        seeds.append(_loss(NOW, f"default{seed}", "default") - dense)
    text = "default lose {:.3f}, {:.3f}, and {:.3f} to dense"
    claims.append(Claim(STUDY, text, tuple(seeds)))

    by_measure = {cost["measure"]: cost for cost in result(NOW)["costs"]}
    names = (
        "loss, code",
        "loss, mixed, last positions",
        "niah_multiquery@own forced, 8192",
        "niah_multiquery@own forced, 32768",
    )
    worse = [
        name
        for name, cost in by_measure.items()
        if not cost["is_noise"] and mean(cost["worse"]) > 0
    ]
    # Six losses, and these tasks.
    assert set(names) <= set(worse)
    assert [name for name in worse if not name.startswith("loss")] == [*names[2:]]
    assert len(worse) == 8
    text = (
        "{:.3f} on code, {:.3f} at the last positions of mixed text. So are several needles: "
        "{:.0f} % fewer at 8,192 tokens, {:.0f} % at 32,768."
    )
    lost = [mean(by_measure[name]["worse"]) for name in names]
    claims.append(Claim(STUDY, text, tuple(lost)))

    read = _loss(NOW, "dense", "default") - _loss(NOW, "dense", "dense")
    claims.append(Claim(STUDY, "Dense weights read by the default lose {:.3f}.", (read,)))

    moba = result(NOW)["runs"]["moba"]
    dense = result(NOW)["runs"]["dense"]
    above = 100 * (moba["final_loss"] / dense["final_loss"] - 1)
    text = "MoBA, {:.0f} % density, ended {:.0f} % above dense in training loss."
    claims.append(Claim(STUDY, text, (100 * moba["mean_density"], above)))
    return [*claims, _headline()]


def _row(shown: str, file: str, name: str) -> Claim:
    """Density, recall, speed; loss above dense as trained and read densely; needles of both."""
    dense = _loss(file, "dense", "dense")
    mode = result(file)["runs"][name]["method"]
    speed = result(file)["runs"][name]["tokens_per_second"]
    needles = (*_needles(file, name, mode), *_needles(file, name, "dense"))
    of_needles = " {:.0f} / {:.0f} % | {:.0f} / {:.0f} % |"
    if name == "dense":
        return Claim(STUDY, "| dense | 100 % | | {:,.0f} | 0 | 0 |" + of_needles, (speed, *needles))
    costs = (_loss(file, name, mode) - dense, _loss(file, name, "dense") - dense)
    of_speed = " **{:,.0f}** |" if name == "default" else " {:,.0f} |"
    kept = _kept(file, name, mode)
    # A window chooses nothing, so that it has no recall.
    of_kept = " {:.1f} % | |" if name == "window" else " {:.1f} % | {:.2f} |"
    kept = kept[:1] if name == "window" else kept
    row = f"| {shown} |" + of_kept + of_speed + " {:.3f} | {:.3f} |" + of_needles
    return Claim(STUDY, row, (*kept, speed, *costs, *needles))


def _headline() -> Claim:
    values = []
    for name in ("default", "xattention", "published_95"):
        file = NOW
        cost = _loss(file, name, name) - _loss(file, "dense", "dense")
        values += [cost, *_kept(file, name, name), *_needles(file, name, name)[:1]]
    values += _needles(NOW, "dense", "dense")[:1]
    text = (
        "default {:.3f} ({:.0f} % density, recall {:.2f}, needles {:.0f} %), xattention {:.3f} "
        "({:.0f} %, {:.2f}, {:.0f} %), published {:.3f} ({:.0f} %, {:.2f}, {:.0f} %); dense {:.0f} %"
    )
    return Claim(README, text, tuple(values))


def _evaluated(file: str, name: str, mode: str) -> dict:
    [found] = [
        one for one in result(file)["evaluations"] if (one["weights"], one["mode"]) == (name, mode)
    ]
    return found


def _kept(file: str, name: str, mode: str) -> tuple[float, float]:
    """Density in %, and recall."""
    attention = _evaluated(file, name, mode)["attention"]
    return 100 * attention["density"], attention["recall"]


def _loss(file: str, name: str, mode: str) -> float:
    """On held-out text, mean of its kinds."""
    scores = _evaluated(file, name, mode)["scores"]
    return mean(scores[f"loss, {kind}"] for kind in ("code", "prose", "mixed"))


def _needles(file: str, name: str, mode: str) -> tuple[float, float]:
    """Right tokens of needles at the shortest sparse length and at the longest, %."""
    scores = _evaluated(file, name, mode)["scores"]
    return scores["needle forced, 8192"], scores["needle forced, 65536"]
