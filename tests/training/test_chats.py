"""Training on chats: packed under context parallelism as in one process, and with nothing to learn."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of
from titan_sparse.data import build_loader
from titan_sparse.data.packing import IGNORED_LABEL

TEMPLATE = """\
{%- for message in messages %}{{- '<' + message.role + '>' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def write_chats(folder: Path) -> None:
    """Chats of 60 to 280 bytes. Some teach nothing, and one of these is a sequence of its own."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(24):
        question, answer = (
            "".join(draw.choice(list("abcdef ")) for _ in range(draw.integers(8, 99)))
            for _ in range(2)
        )
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "train": number % 4 > 0},
        ]
        if number % 8 == 0:
            messages[0]["content"] *= 280 // len(question) - len(answer) // len(question) - 1
        rows.append({"messages": messages})
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)


def _config(folder: Path, output: str, **options):
    return tiny_config(
        folder,
        output,
        data__source=str(folder / "chats.jsonl"),
        data__format="messages",
        data__chat_template=str(folder / "template.jinja"),
        attention__pattern="dense",
        **options,
    )


def _run(config) -> dict:
    weights = weights_of(train(config))
    dist.barrier()
    lines = metrics_of(config)
    keys = ("loss", "grad_norm", "tokens_seen")
    return {"weights": weights, "metrics": [[line[key] for key in keys] for line in lines]}


def _alone(folder: Path) -> None:
    torch.save(_run(_config(folder, "one")), folder / "one.pt")


def _shared(folder: Path) -> None:
    """On two ranks of contiguous blocks, the first of which often has nothing to learn."""
    options = {"parallelism__cp": 2, "attention__layout": "contiguous"}
    got = _run(_config(folder, "two", **options))
    wanted = torch.load(folder / "one.pt")
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert all(np.isfinite(line).all() for line in got["metrics"])


def test_two_processes_equal_one(tmp_path):
    write_chats(tmp_path)
    _check_what_is_read(_config(tmp_path, "one"))
    run_processes(1, _alone, tmp_path)
    run_processes(2, _shared, tmp_path)


def _check_what_is_read(config) -> None:
    """Some sequences hold several chats, and of some the first rank's half has no label."""
    loader = build_loader(config.data, config.training.seq_len, 1, config.training.seed, 0, 1)
    batches = [next(loader) for _ in range(config.training.steps)]
    assert max(len(batch.lengths[0]) for batch in batches) > 1
    first_halves = [batch.labels[0, :160] for batch in batches]
    assert any((labels == IGNORED_LABEL).all() for labels in first_halves)
    assert all((batch.labels != IGNORED_LABEL).any() for batch in batches)


def _nothing_to_learn(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"][1]["train"] = False
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = _config(folder, "none", optimizer__weight_decay=0.0, parallelism__cp=2)
    got = _run(config)
    assert [line[:2] for line in got["metrics"]] == [[0.0, 0.0]] * config.training.steps
    assert all(weight.isfinite().all() for weight in got["weights"].values())


def test_nothing_to_learn_is_a_loss_of_zero(tmp_path):
    write_chats(tmp_path)
    run_processes(2, _nothing_to_learn, tmp_path)
