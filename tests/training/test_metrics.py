"""What a run logs: the file of metrics, speeds and the ETA, TensorBoard, and wandb."""

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.compare_runs import differences
from tests.distributed import on_ranks, run_processes
from tests.runs import TINY, metrics_of, tiny_config, train
from tests.training.test_validation import VALIDATION
from titan_sparse.attention.observe import Recording
from titan_sparse.config import Config, ConfigError, check_start
from titan_sparse.evaluation.pictures import heat_map
from titan_sparse.training import metrics
from titan_sparse.training.metrics import MetricsLog, json_ready
from titan_sparse.training.metrics_output import JsonLines, read_lines, read_metrics, tag

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


def test_steps_that_a_run_has_left_do_not_count(tmp_path):
    """From step 8 the run goes back to 4, logs every second step, and ends
    at 6. Then it goes on."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 6):
        lines.write({"step": step, "loss": 1.0})
    assert list(read_metrics(tmp_path)) == [1, 2, 3, 4, 5, 6]
    lines.write({"step": 8, "loss": 2.0})
    lines.close()
    steps = differences(tmp_path, tmp_path)
    assert [(step.step, step.a) for step in steps][-3:] == [(5, 1.0), (6, 1.0), (8, 2.0)]


def _sorted(tags: list[str]) -> list[str]:
    """As TensorBoard sorts tags: by letters, with slashes and underscores before them."""
    first = {"/": -2, "_": -1}
    return sorted(tags, key=lambda tag: [first.get(letter, ord(letter)) for letter in tag])


def test_tensorboard_shows_no_steps_that_a_run_has_left(texts):
    """The second time, it goes on from step 2 with another learning rate."""
    settings = {"checkpoint__enable": True, "checkpoint__interval": 2, "metrics__tensorboard": True}
    train(tiny_config(texts, "run", training__steps=6, **settings))
    for step in (4, 6):
        shutil.rmtree(texts / f"run/checkpoint/step-{step}")
    config = tiny_config(texts, "run", training__steps=5, optimizer__lr=0.1, **settings)
    train(config)
    events = EventAccumulator(str(texts / "run/tensorboard")).Reload().Scalars("Train/loss")
    wanted = {step: line["loss"] for step, line in read_metrics(texts / "run").items()}
    assert {event.step: event.value for event in events} == pytest.approx(wanted)
    assert [event.step for event in events] == [1, 2, 3, 4, 5]


@on_ranks(2)
def test_tensorboard_opens_on_the_loss(texts):
    config = tiny_config(
        texts,
        "run",
        training__steps=4,
        parallelism__cp=2,
        # Each rank has other heads.
        attention__schedule="ulysses",
        checkpoint__enable=True,
        checkpoint__interval=2,
        metrics__tensorboard=True,
        metrics__pictures_every=2,
    )
    train(config)
    dist.barrier()
    events = EventAccumulator(str(texts / "run/tensorboard")).Reload()
    tags = _sorted(events.Tags()["scalars"])
    assert tags[:2] == ["Train/grad_norm", "Train/loss"]
    sections = [name for name, _ in itertools.groupby(tags, lambda tag: tag.split("/")[0])]
    by_layer = ["attention_density_by_layer", "attention_recall_by_layer"]
    assert sections == ["Train", "attention", *by_layer, "comm", "memory", "speed"]
    lines = metrics_of(config)
    for field in lines[-1].keys() - {"step", "time", "mfu"}:
        assert events.Scalars(tag(field))[-1].value == pytest.approx(lines[-1][field]), field
    # The save after step 2 is in the line of step 3; that after the last step is in none.
    assert [line["step"] for line in lines if "save_seconds" in line] == [3]
    assert len(events.Scalars("speed/save_seconds")) == 1
    for before, line in itertools.pairwise(lines):
        tokens = line["tokens_seen"] - before["tokens_seen"]
        of_device = line["tokens_per_second_per_device"] * line["step_seconds"]
        assert 2 * of_device == pytest.approx(tokens)
    times = [line["time"] for line in lines]
    assert times == sorted(times) and events.Scalars("Train/loss")[-1].wall_time - times[-1] < 5

    pictures = sorted(events.Tags()["images"])
    names = ("density_heat_map", "recall_heat_map", "selection")
    assert pictures == [f"attention/{name}" for name in names]
    for name in pictures:
        assert [event.step for event in events.Images(name)] == [1, 2, 4]


def test_tokens_of_documents_that_are_sparse_are_logged(tmp_path, capfd, caplog):
    """Their share by hand. Without any, a run says so: in the banner where it can know."""
    caplog.set_level(logging.INFO, "titan_sparse")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, letters in enumerate((99, 149, 59)):  # and a token that ends each
        (texts / f"{number}.txt").write_text("a" * letters)
    settings = {"training__steps": 1, "training__seq_len": 310, "data__shuffle": False}
    logged, printed = {}, {}
    for least in (100, 140, 200, 4096):
        settings["attention__vertical_slash__dense_below"] = least
        config = tiny_config(tmp_path, str(least), **settings)
        train(config)
        logged[least] = metrics_of(config)[0]["sparse_tokens"]
        printed[least] = "".join([*capfd.readouterr(), caplog.text])
        caplog.clear()
    assert logged == {100: pytest.approx(250 / 310), 140: pytest.approx(150 / 310), 200: 0, 4096: 0}
    assert [least for least in printed if "nothing is sparse" in printed[least]] == [200, 4096]
    assert "no document of step 1 has more than 150 tokens" in printed[200]
    assert "note  nothing is sparse: training.seq_len = 310" in printed[4096]
    assert printed[4096].count("nothing is sparse") == 1
    # The banner has the options that differ from their defaults, and says what memory counts.
    assert "vertical_slash with recall = 0.6, sinks = 2, local_slashes = 1" in printed[200]
    assert "probe" not in printed[200] and "steps log the peak of the whole process" in printed[200]
    config = tiny_config(tmp_path, "dense", **settings, attention__pattern="dense")
    train(config)
    assert "sparse_tokens" not in metrics_of(config)[0]


def test_a_heat_map_has_a_color_for_each_head():
    values = torch.tensor([[0.0, 1.0, 1.0], [torch.nan, 0.25, 0.0]])
    # A root is drawn, and a picture of each head with a gap on its right and below.
    figure = heat_map(values[:, :, None, None].expand(2, 3, 4, 4), "share", (0, 0.25, 1))
    axes, scale = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("query head", "layer")
    drawn = torch.tensor(axes.images[0].get_array().filled(torch.nan)).view(2, 6, 3, 6)
    wanted = values.sqrt()[:, None, :, None].expand(2, 4, 3, 4)
    torch.testing.assert_close(drawn[:, :4, :, :4].float(), wanted, equal_nan=True)
    assert drawn[:, 4:].isnan().all() and drawn[..., 4:].isnan().all()
    assert list(scale.get_yticks()) == [0, 0.5, 1]
    assert [text.get_text() for text in scale.get_yticklabels()] == ["0", "0.25", "1"]


TRACKED = VALIDATION | {
    "metrics__trackers": "wandb",
    "training__steps": 2,
    "training__dtype": "float32",
    "checkpoint__enable": True,
    "validation__every": 2,
}
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    # Its own process may start slowly, beside other tests.
    "WANDB__SERVICE_WAIT": "300",
    "WANDB_INIT_TIMEOUT": "300",
}
"""For the processes of a run, which are forked from one that knows no variables set here."""


def _two_halves(folder: Path) -> None:
    """Leaves in folder/seen.jsonl what wandb was given: the run, its planned steps, the record."""
    os.environ |= OFFLINE
    import wandb

    log = wandb.Run.log

    def noted_log(run: wandb.Run, record: dict) -> None:
        seen = [run.id, run.config["training"]["steps"], json_ready(record)]
        with open(folder / "seen.jsonl", "a") as file:
            file.write(json.dumps(seen) + "\n")
        log(run, record)

    wandb.Run.log = noted_log
    config = tiny_config(folder, "run", **TRACKED)
    train(config)
    config.training.steps = 4
    train(config)


def test_a_run_and_its_continuation_are_one_run(texts):
    pytest.importorskip("wandb")
    run_processes(2, _two_halves, texts)
    run = texts / "run"
    number = (run / "wandb_run_id").read_text().strip()
    # Rank 0 alone, before and after.
    files = (run / "wandb").glob("offline-run-*/*.wandb")
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2
    seen = [json.loads(line) for line in (texts / "seen.jsonl").read_text().splitlines()]
    assert {name for name, _, _ in seen} == {number}
    lines = metrics_of(tiny_config(texts, "run"))
    found = [(steps, record) for _, steps, record in seen if "loss" in record]
    assert [steps for steps, _ in found] == [2, 2, 4, 4]
    assert [record for _, record in found] == lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    validations = [record for _, _, record in seen if "validation/loss" in record]
    text = (run / "validation.jsonl").read_text()
    for row, line in zip(validations, map(json.loads, text.splitlines()), strict=True):
        assert row["step"] == line["step"]
        assert row["validation/loss"] == pytest.approx(line["loss"])
        assert row["validation_needle/loss"] == pytest.approx(line["needle"]["loss"])
        start = line["buckets"][1]["start"]
        assert row[f"validation_loss_by_position/{start}"] == line["buckets"][1]["loss"]


def test_what_is_not_installed_is_refused(tmp_path, monkeypatch):
    """Also beside a folder "wandb" of earlier runs, which Python takes for a package."""
    config = Config()
    config.training.output_dir = str(tmp_path / "run")
    config.metrics.trackers = "wandb"
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    advice = r'is not installed; write pip install "titan-sparse\[wandb\]"'
    with pytest.raises(ConfigError, match=advice):
        check_start(config)


class _Clocked:
    """A run's log, with a clock of our own."""

    def __init__(self, folder: Path, name: str, **settings) -> None:
        self.config = tiny_config(folder, name, **settings)
        self.log = MetricsLog(self.config, TINY, torch.device("cpu"))
        self.now = 0.0
        self.etas: list[str] = []
        metrics.time.perf_counter = lambda: self.now
        metrics.logger.info = lambda line: self.etas.append(line.split("ETA ")[1].split()[0])
        self.log.start_interval()
        self.nothing = Recording()
        self.nothing.visited, self.nothing.visible = [torch.ones(4)], [torch.ones(())]

    def steps(self, first: int, *seconds: float) -> None:
        values = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
        for step, took in enumerate(seconds, first):
            self.now += took
            self.log.count(1000)
            if self.log.should_log(step):
                self.log.log(step, 0, values, self.nothing, 10.0)

    def save(self, seconds: float) -> None:
        self.now += seconds
        self.log.leave_out(seconds)

    def validate(self, seconds: float) -> None:
        self.now += seconds
        self.log.start_interval()


def _speeds(folder: Path) -> None:
    """Steps of 1 s, with 30 s of saving, and a save and a validation between them."""
    run = _Clocked(folder, "speeds", training__steps=100, metrics__log_every=2)
    run.steps(1, 1, 1, 1)
    run.save(30.0)
    run.steps(4, 1)
    run.save(20.0)
    run.validate(7)
    run.steps(5, 1, 1)
    run.log.close()
    lines = {line["step"]: line for line in metrics_of(run.config)}
    for line in lines.values():
        assert line["tokens_per_second_per_device"] == pytest.approx(1000)
        assert line["step_seconds"] == pytest.approx(1)
    assert [lines[n].get("save_seconds") for n in (1, 2, 4, 6)] == [None, None, 30, 20]
    assert run.etas[:2] == ["?", "0:01:38"]


def _etas(folder: Path) -> None:
    run = _Clocked(folder, "etas", training__steps=1000, metrics__log_every=1)
    # The first step compiles, and the times of the next ones differ.
    run.steps(1, 600.0, 1.0, 3.0, 0.5)
    assert run.etas == ["?", "0:16:38", "0:33:14", "0:24:54"]  # 998 x 1, 997 x 2, 996 x 1.5
    run.save(500.0)
    run.steps(5, 1.5)
    run.validate(700)
    run.steps(6, 1.5)
    assert run.etas[4:] == ["0:24:52", "0:24:51"]
    # What was measured long ago is forgotten.
    run.steps(7, *[2.0] * 20)
    assert run.etas[-1] == "0:32:28"  # 974 x 2
    # Each step counts alike: 19 of 2 s, and 10 of 10 s in one interval.
    for _ in range(9):
        run.log.count(1000)
    run.steps(36, 100.0)
    assert run.etas[-1] == "1:16:27"  # 964 x 138 / 29
    run.log.close()


@on_ranks(1)
def test_speeds_leave_saves_out_and_the_eta_is_a_mean_over_the_last_intervals(tmp_path):
    _speeds(tmp_path)
    _etas(tmp_path)
