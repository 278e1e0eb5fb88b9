"""The same run on 1 to 4 processes, with all levers that save memory, and on chats."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.data.helpers import write_rows
from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.config import Config
from titan_sparse.data import build_loader
from titan_sparse.loss import IGNORE_INDEX
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.training import offload
from titan_sparse.training.trainer import Trainer

Case = dict[str, object]
"""Overrides of tiny_config(). "batch": sequences a step of the run on one
process that equals it."""


def _run(config: Config) -> tuple[dict, Trainer]:
    trainer = train(config)
    dist.barrier()
    assert not Path(config.training.output_dir, "checkpoint").exists()
    lines = metrics_of(config)
    keys = ["loss", "grad_norm", "lr", "tokens_seen"]
    if config.training.gradient_accumulation_steps == 1:
        # Otherwise density is that of the last micro-batch.
        keys.append("density")
    result = {
        "weights": weights_of(trainer),
        "metrics": [[line[key] for key in keys] for line in lines],
        "recall": [line["recall"] for line in lines if "recall" in line],
    }
    return result, trainer


def _single(folder: Path) -> None:
    for pattern, batch in (("dense", 1), ("vertical_slash", 1), ("vertical_slash", 2)):
        case = {"attention__pattern": pattern, "training__local_batch_size": batch}
        output = f"single_{pattern}_{batch}"
        result, _ = _run(tiny_config(folder, output, training__steps=2, **case))
        torch.save(result, folder / f"{pattern}_{batch}.pt")


def _compare(folder: Path, cases: list[Case]) -> None:
    offload.MIN_BYTES = 4096  # smaller than a rank's input of a block, and than most of its weights
    for number, case in enumerate(cases):
        overrides = {key: value for key, value in case.items() if key != "batch"}
        wanted = torch.load(folder / f"{case['attention__pattern']}_{case['batch']}.pt")
        output = f"run_{dist.get_world_size()}_{len(cases)}_{number}"
        got, trainer = _run(tiny_config(folder, output, training__steps=2, **overrides))
        width = len(got["metrics"][0])
        wanted["metrics"] = [line[:width] for line in wanted["metrics"]]
        for what in ("metrics", "weights"):
            torch.testing.assert_close(
                got[what], wanted[what], rtol=1e-8, atol=1e-8, msg=lambda m, c=case: f"{c}: {m}"
            )
        torch.testing.assert_close(got["recall"], wanted["recall"], rtol=0.2, atol=0.1)
        if case == LEVERS:
            _check_levers(trainer)


def _spread(pattern: str, layout: str, schedule: str, world_size: int, **more) -> Case:
    return {
        "attention__pattern": pattern,
        "attention__layout": layout,
        "attention__schedule": schedule,
        "parallelism__cp": world_size,
        "parallelism__cp_intra": world_size,
        "batch": 1,
    } | more


RECOMPUTE = "activation_checkpoint__attention_recompute"
LEVERS: Case = {
    "attention__pattern": "vertical_slash",
    "parallelism__cp": 4,
    "training__gradient_accumulation_steps": 2,
    "training__mlp_chunk_tokens": 24,
    "compile__enable": True,
    "compile__backend": "aot_eager",
    "activation_checkpoint__offload": True,
    "optimizer__offload": True,
    "batch": 2,
}
SPARSE: Case = {"attention__pattern": "vertical_slash", "parallelism__cp": 2, "batch": 2}
THREE = [
    _spread("vertical_slash", "zigzag", "ring", 3),
    _spread("dense", "contiguous", "all_gather", 3),
]
FOUR = [
    _spread("vertical_slash", "striped", "double_ring", 4)
    | {"parallelism__cp_intra": 2, RECOMPUTE: 0.5},
    _spread("vertical_slash", "zigzag", "ulysses", 4) | {RECOMPUTE: 0.5},
    # Two context-parallel groups on data of their own, replicated, and by accumulation.
    SPARSE | {"parallelism__dp_replicate": 2},
    LEVERS,
]


def _check_levers(trainer: Trainer) -> None:
    pool = trainer.model.run_blocks.pool
    tokens = 320 // 4  # 300 padded to blocks of 16 for four ranks
    assert isinstance(trainer.model.layers["0"].mlp, ChunkedMLP)
    # Of the one block that is not the last: input, out and verticals. No gathered weights.
    assert sum(map(len, pool.free.values())) == 3 and pool.free[tokens * 32 * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, and the results of one process to compare with."""
    folder = tmp_path_factory.mktemp("parity")
    write_texts(folder / "texts")
    run_processes(1, _single, folder)
    return folder


def test_three_processes(folder):
    run_processes(3, _compare, folder, THREE)


def test_four_processes(folder):
    run_processes(4, _compare, folder, FOUR)


TEMPLATE = """\
{%- for message in messages %}{{- '<' + message.role + '>' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def write_chats(folder: Path) -> None:
    """Chats of 60 to 280 bytes. Some teach nothing, one of them a sequence of its own."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(24):
        question, answer = (
            "".join(draw.choice(list("abcdef ")) for _ in range(draw.integers(8, 99)))
            for _ in range(2)
        )
        if number % 8 == 0:
            question *= 280 // len(question) - len(answer) // len(question) - 1
        asked = {"role": "user", "content": question}
        answered = {"role": "assistant", "content": answer, "train": number % 4 > 0}
        rows.append([asked, answered])
    write_rows(folder / "chats.jsonl", [{"messages": row} for row in rows])
    untaught = [[asked, answered | {"train": False}] for asked, answered in rows]
    write_rows(folder / "untaught.jsonl", [{"messages": row} for row in untaught])
    (folder / "template.jinja").write_text(TEMPLATE)


def _chat_config(folder: Path, output: str, name: str = "chats", **options):
    return tiny_config(
        folder,
        output,
        data__source=str(folder / f"{name}.jsonl"),
        data__format="messages",
        data__chat_template=str(folder / "template.jinja"),
        attention__pattern="dense",
        **options,
    )


def _chats_alone(folder: Path) -> None:
    torch.save(_run(_chat_config(folder, "one"))[0], folder / "one.pt")
    _nothing_to_learn(folder)


def _shared_chats(folder: Path) -> None:
    """On two ranks of contiguous blocks, the first of which often has nothing to learn."""
    options = {"parallelism__cp": 2, "attention__layout": "contiguous"}
    got, _ = _run(_chat_config(folder, "two", **options))
    wanted = torch.load(folder / "one.pt")
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert all(np.isfinite(line).all() for line in got["metrics"])


def test_two_processes_equal_one(tmp_path):
    write_chats(tmp_path)
    _check_what_is_read(_chat_config(tmp_path, "one"))
    run_processes(1, _chats_alone, tmp_path)
    run_processes(2, _shared_chats, tmp_path)


def _check_what_is_read(config) -> None:
    """Some sequences hold several chats, and of some the first rank's half has no label."""
    loader = build_loader(config.data, config.training.seq_len, 1, config.training.seed, 0, 1)
    batches = [next(loader) for _ in range(config.training.steps)]
    assert max(len(batch.lengths[0]) for batch in batches) > 1
    first_halves = [batch.labels[0, :160] for batch in batches]
    assert any((labels == IGNORE_INDEX).all() for labels in first_halves)
    assert all((batch.labels != IGNORE_INDEX).any() for batch in batches)


def _nothing_to_learn(folder: Path) -> None:
    """A step without a label has a loss of zero and leaves the weights finite."""
    config = _chat_config(folder, "none", "untaught", optimizer__weight_decay=0.0)
    got, _ = _run(config)
    assert [line[:2] for line in got["metrics"]] == [[0.0, 0.0]] * config.training.steps
    assert all(weight.isfinite().all() for weight in got["weights"].values())
