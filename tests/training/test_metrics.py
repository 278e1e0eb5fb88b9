"""What a run logs: balance and communication counted by hand, the file of metrics, TensorBoard, wandb."""

import itertools
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.device_mesh import init_device_mesh

from scripts.compare_runs import differences
from tests.distributed import run_processes
from tests.reference import structured_qkv
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention import ContextParallel, attend, recorder
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe import Recording, recording, worker_imbalance
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.config import Config, ConfigError, check_start
from titan_sparse.evaluation.pictures import heat_map
from titan_sparse.training.metrics import context_parallel_averages, json_ready
from titan_sparse.training.metrics_output import JsonLines, read_lines, read_metrics, tag

BLOCK, BATCH, HEADS, KV_HEADS, DIM = 16, 2, 4, 2, 8
TOKENS = 6 * BLOCK  # of a rank


def _cp(layout: str, schedule: str, *options) -> ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return ContextParallel(mesh, layout, schedule, BLOCK, *options)


def _record(cp, calls=1, pattern=Dense(), dtype=torch.float64, delay=0.0, backward=False):
    """The recording of `calls` attention calls, and the index of the last."""
    seq_len = TOKENS * dist.get_world_size()
    local = [
        cp.shard(x, 2).requires_grad_()
        for x in structured_qkv(BATCH, HEADS, KV_HEADS, seq_len, DIM, dtype=dtype)
    ]
    dist.barrier()
    with recording() as seen:
        for _ in range(calls):
            time.sleep(delay)
            out, aux = attend(*local, Causal(), pattern, cp, return_aux=True)
            if backward:
                out.sum().backward()
    return seen, aux.index


def _check_work() -> None:
    ranks = dist.get_world_size()
    n = TOKENS
    own, other = n * (n + 1) // 2, n * n
    by_hand = [own + rank * other for rank in range(ranks)]
    by_hand = BATCH * HEADS * torch.tensor(by_hand, dtype=torch.float64)
    seen, _ = _record(_cp("contiguous", "ring"), calls=2)
    measured = seen.by_rank()
    assert torch.equal(measured.work, torch.stack([by_hand, by_hand]))
    assert torch.equal(measured.compute > 0, measured.work > 0)
    logged = context_parallel_averages(seen)
    busiest = by_hand.max() / by_hand.mean()
    assert logged["worker_imbalance"] == pytest.approx(busiest.item())
    assert logged["worker_imbalance"] == pytest.approx(2 - 1 / ranks, rel=0.02)
    for schedule in ("ring", "all_gather"):
        seen, _ = _record(_cp("zigzag", schedule))
        work = seen.by_rank().work
        assert context_parallel_averages(seen)["worker_imbalance"] == 1.0
        assert work.shape == (1, ranks) and work.sum() == by_hand.sum()


def _check_waiting() -> None:
    """A rank that is late makes the others wait, and that is not computing."""
    for schedule in ("ring", "all_gather"):
        cp, late = _cp("zigzag", schedule), dist.get_rank() == 1
        _record(cp)
        began = time.perf_counter()
        seen, _ = _record(cp, delay=1.0 * late)
        took = 1e3 * (time.perf_counter() - began)
        _, compute, elapsed = (x[0] for x in seen.by_rank())
        waited = elapsed - compute
        assert (elapsed >= compute).all() and (compute > 0).all()
        assert min(waited[0], waited[2]) > 800 and waited[1] < 500, (schedule, waited)
        assert compute.max() < 500 and elapsed[dist.get_rank()] < took
        logged = context_parallel_averages(seen)
        assert logged["exposed_communication_ms"] == pytest.approx(waited.mean().item())
        assert logged["exposed_communication_share"] == pytest.approx(
            (waited.sum() / elapsed.sum()).item()
        )
        assert logged["worker_imbalance_time"] == pytest.approx(worker_imbalance(compute).item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_times_on_a_gpu_need_no_waiting():
    device = torch.device("cuda")
    small, large = (torch.randn(n, n, device=device) for n in (256, 8192))
    small @ small, large @ large  # the first products load libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call = recorder.TimedCall(ContextParallel(None, schedule="local"), device)
        for x in (small, large):
            with call.computing():
                x @ x
            large @ large
        call.ended = recorder.mark(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compute, elapsed = call.milliseconds()
    assert 0 < compute and elapsed > 1.4 * compute


def _check_bytes() -> None:
    """Chunks of keys and values in bf16 (1), and their gradients in fp32 (2), on a ring of 3."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk = 2 * BATCH * KV_HEADS * TOKENS * DIM * 2
    plain = (ranks - 1) * (1 + 1 + 2) * chunk
    # Causal and contiguous: chunk s is needed by the ranks after s; its gradient comes home around
    # the whole ring.
    keys, gradients = [1, 2, 0], [1, 1, 2]
    seen, _ = _record(_cp("contiguous", "ring"), dtype=torch.bfloat16, backward=True)
    assert seen.bytes_sent == (2 * keys[rank] + 2 * gradients[rank]) * chunk
    assert seen.plain_ring_bytes == plain
    logged = context_parallel_averages(seen)
    sent = (2 * sum(keys) + 2 * sum(gradients)) * chunk / ranks
    assert logged["cp_sent_of_plain_ring"] == pytest.approx(sent / plain)
    assert logged["cp_gib_sent"] == pytest.approx(sent / 2**30)


def _check_bytes_besides() -> None:
    """Verticals in bf16, their gradients in fp32, each summed over a ring. Selection by select() alone."""
    ranks = dist.get_world_size()
    cp = _cp("striped", "ring")
    pattern = VerticalSlash(recall=0.7, max_verticals=40, dense_below=48)
    seen, index = _record(cp, 2, pattern=pattern, dtype=torch.bfloat16, backward=True)
    # Numbers in k and v of the verticals, and bytes of each in bf16 and in fp32.
    numbers = 2 * index.verticals.numel() * DIM
    expected = sum(2 * (2 * numbers * size * (ranks - 1) // ranks) for size in (2, 4))
    assert seen.bytes_of_verticals == expected > 0
    before = cp.sent["collectives"]
    q, k, _ = structured_qkv(BATCH, HEADS, KV_HEADS, TOKENS * ranks, DIM, dtype=torch.bfloat16)
    pattern.select(cp.shard(q, 2), cp.shard(k, 2), Causal(), cp)
    assert seen.bytes_of_selection == 2 * (cp.sent["collectives"] - before) > 0
    logged = context_parallel_averages(seen)
    assert logged["cp_gib_verticals"] * 2**30 == pytest.approx(seen.bytes_of_verticals)
    assert logged["cp_gib_selection"] * 2**30 == pytest.approx(seen.bytes_of_selection)
    assert seen.bytes_sent == seen.plain_ring_bytes
    assert _record(_cp("striped", "ring"))[0].bytes_of_verticals == 0


def _check_bytes_of_recordings_within_recordings() -> None:
    """Each counts its own calls and what they send, backward included."""
    ranks = dist.get_world_size()
    pattern = VerticalSlash(recall=0.7, max_verticals=40, dense_below=48)
    qkv = structured_qkv(BATCH, HEADS, KV_HEADS, TOKENS * ranks, DIM)
    cp, other = _cp("striped", "ring"), _cp("contiguous", "ring")

    def run(cp: ContextParallel = cp) -> None:
        local = [cp.shard(x, 2).requires_grad_() for x in qkv]
        attend(*local, Causal(), pattern, cp).sum().backward()

    def counts(seen: Recording, times: int = 1) -> list[int]:
        all_bytes = (seen.bytes_sent, seen.plain_ring_bytes, seen.bytes_of_verticals)
        numbers = [*all_bytes, seen.bytes_of_selection, len(seen.calls)]
        return [number * times for number in numbers]

    run()
    with recording() as one:
        run()
    assert min(counts(one)) > 0
    with recording() as outer:
        run()
        with recording() as middle:
            with recording() as inner:
                run()
                run()
            run()
            with pytest.raises(KeyError), recording() as failing:
                run()
                raise KeyError
            with recording() as of_others:
                run(other)
            with recording() as nothing:
                pass
        run()
        with recording(), recording() as last:
            run()
    run()
    wanted = {2: (outer, inner), 1: (middle, failing, last), 0: (nothing,)}
    for times, recordings in wanted.items():
        for seen in recordings:
            assert counts(seen) == counts(one, times), (times, counts(seen), counts(one))
    assert len(of_others.calls) == 1 and of_others.bytes_sent > 0


def _check_all() -> None:
    _check_work()
    _check_bytes()
    _check_bytes_besides()
    _check_bytes_of_recordings_within_recordings()
    _check_waiting()


def test_recorded_over_ranks():
    run_processes(3, _check_all)


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


def _train_with_pictures(folder: Path) -> None:
    config = tiny_config(
        folder,
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


def _sorted(tags: list[str]) -> list[str]:
    """As TensorBoard sorts tags: by letters, with slashes and underscores before them."""
    return sorted(tags, key=lambda tag: ["/_".find(c) - 2 if c in "/_" else ord(c) for c in tag])


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


def test_tensorboard_opens_on_the_loss(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _train_with_pictures, tmp_path)
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    tags = _sorted(events.Tags()["scalars"])
    assert tags[:2] == ["Train/grad_norm", "Train/loss"]
    sections = [name for name, _ in itertools.groupby(tags, lambda tag: tag.split("/")[0])]
    assert sections == [
        "Train",
        "attention",
        "attention_density_by_layer",
        "attention_recall_by_layer",
        "comm",
        "memory",
        "speed",
    ]
    lines = metrics_of(tiny_config(tmp_path, "run"))
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

    pictures = [
        f"attention/{name}" for name in ("density_heat_map", "recall_heat_map", "selection")
    ]
    assert sorted(events.Tags()["images"]) == pictures
    for name in pictures:
        assert [event.step for event in events.Images(name)] == [1, 2, 4]


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


TRACKED = {
    "metrics__trackers": "wandb",
    "training__steps": 2,
    "training__dtype": "float32",
    "checkpoint__enable": True,
    "validation__enable": True,
    "validation__every": 2,
    "validation__windows": 2,
    "validation__position_buckets": 2,
    "validation__needle_lengths": "420",
    "validation__needle_depths": 1,
    "validation__needle_samples": 1,
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


def test_a_run_and_its_continuation_are_one_run(tmp_path):
    pytest.importorskip("wandb")
    write_texts(tmp_path / "texts")
    run_processes(2, _two_halves, tmp_path)
    run = tmp_path / "run"
    number = (run / "wandb_run_id").read_text().strip()
    # Rank 0 alone, before and after.
    files = (run / "wandb").glob("offline-run-*/*.wandb")
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert {name for name, _, _ in seen} == {number}
    lines = metrics_of(tiny_config(tmp_path, "run"))
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
    with pytest.raises(
        ConfigError, match=r'is not installed; write pip install "titan-sparse\[wandb\]"'
    ):
        check_start(config)
