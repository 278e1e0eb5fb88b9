"""The command a user types first, shortened."""

import re

from tests.distributed import run_program
from tests.docs.pages import demo_command
from titan_sparse import train
from titan_sparse.training.metrics_output import read_lines


def test_demo(tmp_path):
    """README's command, as it stands there, with options that shorten it."""
    words = demo_command()
    shorter = (
        "--training.steps 3 --training.seq_len 256 --lr_scheduler.warmup_steps 1 "
        "--metrics.recall_every 2 --checkpoint.interval 3 --profiling.enable "
        f"--profiling.first_step 2 --profiling.steps 1 --training.output_dir {tmp_path}"
    )
    own = words[words.index("train.py") + 1 :]
    printed = run_program(2, train.main, [*own, *shorter.split()])
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    # ln(258) = 5.55 for uniform bytes
    assert lines[-1]["loss"] < lines[0]["loss"] and 5 < lines[0]["loss"] < 6
    assert lines[-1]["tokens_seen"] == 3 * 256  # each token once, whatever the ranks
    for line in lines:
        assert 0 < line["density"] <= 1 and line["mfu"] is None and line["memory_gib"] > 0
    assert [line["step"] for line in lines if 0 < line.get("recall", 0) <= 1] == [1, 2]
    for name in ("config.toml", "checkpoint/step-3/.metadata", "profile/rank0.json"):
        assert (tmp_path / name).is_file()
    assert list((tmp_path / "tensorboard").iterdir())
    for words in ("vertical_slash", "eager", "100 %  ETA 0:00:00"):
        assert words in printed
    assert len(re.findall(r"^step ", printed, re.MULTILINE)) == 3
