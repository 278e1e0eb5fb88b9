"""The file of metrics, also on a full disk; and speeds without saves and without the first steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.compare_runs import differences
from tests.distributed import run_processes
from tests.runs import TINY, metrics_of, tiny_config
from titan_sparse.attention.observe.statistics import Recording
from titan_sparse.training import metrics
from titan_sparse.training.metrics import MetricsLog, eta
from titan_sparse.training.metrics_output import JsonLines, Tracker, read_lines, read_metrics

ROOT = Path(__file__).parents[2]
FULL = """
import resource, sys
from titan_sparse.training.metrics_output import JsonLines
lines = JsonLines(sys.argv[1])
lines.write({"step": 1, "loss": 1.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
for step in (2, 3):
    try:
        lines.write({"step": step, "loss": 2.5})
    except OSError as error:
        print(error)
assert "torch" not in sys.modules
"""
LINE = len('{"step": 1, "loss": 1.5}\n')


@pytest.mark.parametrize("room", [LINE, LINE + 10])
def test_a_disk_that_is_full_leaves_no_torn_line(tmp_path, room):
    """No byte of the second line fits, or ten."""
    path = tmp_path / "metrics.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(room)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 2 and all(str(path) in message for message in messages)
    assert path.read_text() == '{"step": 1, "loss": 1.5}\n'


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", "\0\0\0", "\0" * 200_000, '{"step": 3}'])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n'
    path.write_text(whole + torn)
    is_whole = torn.endswith("}")
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3][: 2 + is_whole]
    if not is_whole:
        assert [item.step for item in differences(tmp_path, path)] == [1, 2]

    # The next start writes below what is whole.
    lines = JsonLines(path)
    lines.write({"step": 9})
    lines.close()
    assert path.read_text() == whole + (torn + "\n" if is_whole else "") + '{"step": 9}\n'


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    for name in ("metrics.jsonl", "none/metrics.jsonl"):
        with pytest.raises(OSError, match=name):
            JsonLines(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_file_that_is_deleted_is_missed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="deleted while the run goes on.*metrics.jsonl"):
        lines.write({"step": 1})
    lines.close()


def test_the_later_line_of_a_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, 5.0), (2, 9.0), (3, 8.0), (2, 4.0)]
    path.write_text("".join(json.dumps({"step": n, "loss": x}) + "\n" for n, x in rows))
    assert {n: line["loss"] for n, line in read_metrics(tmp_path).items()} == {1: 5, 2: 4, 3: 8}


def test_names_of_an_earlier_version_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "columns": 5, "columns_at_cap": 0.5, "cp_gib_columns": 2}\n')
    assert read_metrics(path)[1] == {
        "step": 1,
        "verticals": 5,
        "verticals_at_cap": 0.5,
        "cp_gib_verticals": 2,
    }


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"step": 1}\n{"st\n{"step": 3}\n', "line 2 is not a JSON object"),
        ('{"step": 1}\n[2]\n', "line 2 is not a JSON object"),
        ('{"loss": 1}\n', "line 1 does not hold a step's metrics"),
        (None, "neither a run's output_dir"),
    ],
)
def test_what_is_no_metrics_is_refused(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    "steps, seconds, wanted",
    [
        (0, None, "00:00:00"),
        (5, None, "?"),
        (60, 61.0, "01:01:00"),
        (1000, 180.0, "2 d 02:00:00"),
    ],
)
def test_eta(steps, seconds, wanted):
    assert eta(steps, seconds) == wanted


def _speeds(folder) -> None:
    """A clock of our own: two steps of 1 s, with 30 s of saving and a validation between them."""
    config = tiny_config(folder, "run", training__steps=100, metrics__log_every=2)
    now = [0.0]
    metrics.time.perf_counter = lambda: now[0]
    progress = []
    metrics.logger.info = progress.append
    log = MetricsLog(config, TINY, torch.device("cpu"), writes=True, tracker=Tracker(None))
    values = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    nothing = Recording()
    nothing.visited, nothing.visible = [torch.ones(4)], [torch.ones(())]

    def step(number: int) -> None:
        now[0] += 1
        log.count(1000)
        if log.should_log(number):
            log.log(number, 0, values, nothing, 10.0)

    for number in (1, 2, 3):
        step(number)
    now[0] += 30
    log.leave_out(30.0)
    step(4)
    now[0] += 20
    log.leave_out(20.0)
    now[0] += 7
    log.start_interval()
    step(5)
    step(6)
    log.close()
    lines = {line["step"]: line for line in metrics_of(config)}
    for line in lines.values():
        assert line["tokens_per_second_per_device"] == pytest.approx(1000)
        assert line["step_seconds"] == pytest.approx(1)
    assert [lines[n].get("save_seconds") for n in (1, 2, 4, 6)] == [None, None, 30, 20]
    assert [said.split("ETA ")[1].split()[0] for said in progress[:2]] == ["?", "00:01:38"]


def test_speeds_leave_saves_out(tmp_path):
    run_processes(1, _speeds, tmp_path)
