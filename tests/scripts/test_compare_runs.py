"""compare_runs: differences by step, thresholds as exit status, and what cannot be compared."""

import json

import pytest

from scripts.compare_runs import differences, main
from tests.refusals import error_of


def _run(folder, losses: dict) -> str:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, "lr": 0.1}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_differences_by_step_and_the_later_line_counts(tmp_path):
    a = _run(tmp_path / "a", {2: 4.0, 1: 5.0})
    _run(tmp_path / "b", {1: 5.0, 2: 9.0})
    with open(tmp_path / "b/metrics.jsonl", "a") as file:  # resumed from step 1
        file.write(json.dumps({"step": 2, "loss": 4.1}) + "\n")
    found = differences(a, tmp_path / "b/metrics.jsonl")
    assert [item.step for item in found] == [1, 2]
    assert found[0].absolute == found[0].relative == 0
    assert found[1].absolute == pytest.approx(0.1) and found[1].relative == pytest.approx(0.025)


@pytest.mark.parametrize(
    "options, status",
    [
        ([], 0),
        (["--max-difference", "0.09"], 1),
        (["--relative", "0.026"], 0),
        (["--relative", "0.024"], 1),
        (["--field", "lr", "--max-difference", "0"], 0),
    ],
)
def test_status_by_threshold(tmp_path, options, status, capsys):
    a, b = _run(tmp_path / "a", {1: 5.0, 2: 4.0}), _run(tmp_path / "b", {1: 5.0, 2: 4.1})
    assert main([a, b, *options]) == status
    out = capsys.readouterr().out
    assert "largest difference" in out and ("step 2 first" in out) == (status == 1)


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    a, b = _run(tmp_path / "a", {1: 5.0, 2: 4.0}), _run(tmp_path / "b", {1: 5.0, 3: 4.0})
    nan = _run(tmp_path / "nan", {1: None})
    # NaN is beyond any threshold.
    assert main([nan, nan, "--max-difference", "1e9"]) == 1
    for words, reason in (
        ([a, b], "only one of them has step 2"),
        ([a, a, "--plot", str(tmp_path / "none/p.png")], "No such file"),
        ([a, a, "--field", "recall"], "recall was not logged"),
    ):
        assert reason in error_of(capsys, main, *words)
    with pytest.raises(SystemExit):
        main([a, b, "--relative", "-1"])
    assert "not a finite number of 0 or more" in capsys.readouterr().err
