"""The command a user types first, shortened."""

import json
import re
import shlex

import torch.distributed as dist

from tests.distributed import run_program
from tests.docs.commands import demo_command
from titan_sparse.commands import evaluate, export_hf, train
from titan_sparse.config import Config, save
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.run_folder import next_commands


def test_demo(tmp_path):
    """README's command, as it stands there, with options that shorten it."""
    words = demo_command()
    shorter = (
        "--training.steps 3 --training.seq_len 256 "
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
    # A text before and after, a picture, and commands that work.
    assert re.findall(r"^validation (.*?):", printed, re.MULTILINE) == [
        "before the first step",
        "after step 3",
    ]
    texts = re.findall(r"^  text that it writes: (.*)", printed, re.MULTILINE)
    assert len({json.loads(text) for text in texts}) == 2
    assert (tmp_path / "training.png").stat().st_size > 5_000
    commands = re.findall(r"^  (titan-sparse|tensorboard) (.*)", printed, re.MULTILINE)
    assert [shlex.split(words)[0] for _, words in commands] == ["--logdir", "evaluate", "export_hf"]
    for command, (_, words) in zip((evaluate, export_hf), commands[1:]):
        assert command.main([*shlex.split(words)[1:]]) == 0
        if dist.is_initialized():
            dist.destroy_process_group()


def test_what_comes_next_after_a_mixture(tmp_path):
    """Evaluation reads one source, with the format of that part."""
    config = Config()
    config.data.source = "a.jsonl:0.5, b:0.5"
    config.data.format = "messages, text"
    config.training.output_dir = str(tmp_path / "a run")
    config.training.device = "cpu"
    save(config, config.training.output_dir)
    assert [words.split()[0] for words in next_commands(config)] == ["tensorboard"]
    config.checkpoint.enable = True
    _, words, _ = next_commands(config)
    _, evaluated = evaluate.parse(shlex.split(words)[2:])
    assert (evaluated.data.source, evaluated.data.format) == ("a.jsonl", "messages")
