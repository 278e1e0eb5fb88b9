"""The model "titan_sparse" on several ranks, on a run's checkpoint, and from lm_eval's command line."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import run_processes
from tests.integrations.lm_eval.folders import write_folder, write_tasks
from tests.runs import debug_run, write_texts

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from titan_sparse.integrations.lm_eval import TitanSparseLM
from titan_sparse.integrations.lm_eval.model import _of_rank_zero

TASKS = ["local_choice", "local_roll", "local_write"]


def _evaluate(folder: Path, ranks: str) -> dict | None:
    return simple_evaluate(
        "titan_sparse",
        f"pretrained={folder}/model,training.dtype=float32,attention.block_size=16,{ranks}",
        tasks=TASKS,
        device="cpu",
        batch_size=2,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def _answers(results: dict) -> list:
    """What each task's requests got, one after the other: log-likelihoods, greedy flags, texts."""
    answers = []
    for task in TASKS:
        for sample in results["samples"][task]:
            for (answer,) in sample["resps"]:
                answers += answer if isinstance(answer, list | tuple) else [answer]
    return answers


def _on_two_ranks(folder: Path) -> None:
    """They share a sequence, or each has requests of its own: three questions for two ranks. Ranks
    that are asked otherwise run what rank 0 asks."""
    rank = dist.get_rank()
    expected = json.loads((folder / "one.json").read_text())
    for ranks in (
        "parallelism.cp=2,attention.layout=balanced,attention.schedule=group_cast",
        "parallelism.dp_shard=2",
    ):
        os.environ["LOCAL_RANK"] = "0"  # as on two nodes of one rank each
        results = _evaluate(folder, ranks)
        assert (results is None) == (rank != 0), ranks
        # It names the GPU of this rank, also for what comes later in this process.
        assert os.environ["LOCAL_RANK"] == "0"
        if results is not None:
            assert _answers(results) == pytest.approx(expected, abs=1e-4), ranks

    assert _of_rank_zero({"rank": rank}) == {"rank": 0}
    model = TitanSparseLM(
        pretrained=f"{folder}/model",
        device="cpu",
        **{"training.dtype": "float32", "attention.block_size": 16, "parallelism.cp": 2},
    )
    for method, others in (
        (model.loglikelihood, [("One", " two"), ("Two", " three and more")]),
        (model.loglikelihood_rolling, [("One",), ("Two and more",)]),
        (model.generate_until, [("One", {"max_gen_toks": 2}), ("Two", {"max_gen_toks": 5})]),
    ):
        request = Instance(method.__name__, doc={}, arguments=others[rank], idx=0)
        found: list = [None] * 2
        dist.all_gather_object(found, method([request]))
        assert found[0] == found[1]
    with pytest.raises(ValueError, match="--use_cache needs one process"):
        model.set_cache_hook(None)


def test_several_ranks_answer_as_one(tmp_path):
    write_folder(tmp_path / "model")
    write_tasks(tmp_path / "tasks")
    one = _evaluate(tmp_path, "parallelism.cp=1")
    (tmp_path / "one.json").write_text(json.dumps(_answers(one)))
    run_processes(2, _on_two_ranks, tmp_path)


def test_a_run_sparse_and_dense(tmp_path):
    """Its newest checkpoint or a step, with its config.toml, tokenizer and pattern."""
    write_texts(tmp_path / "texts")
    debug_run(tmp_path, training__seq_len=900, attention__vertical_slash__recall=0.2)
    requests = [
        Instance("loglikelihood", doc={}, arguments=("a b c d " * 30, " e f"), idx=0),
        Instance("loglikelihood", doc={}, arguments=("", " e f"), idx=1),
    ]
    run = tmp_path / "run"
    tokenizer = str(write_folder(tmp_path / "model"))
    newest = TitanSparseLM(checkpoint=str(run), tokenizer=tokenizer, device="cpu")
    of_step = str(run / "checkpoint/step-2")
    step = TitanSparseLM(checkpoint=of_step, tokenizer=tokenizer)
    dense = TitanSparseLM(checkpoint=str(run), tokenizer=tokenizer, attention="dense")
    assert newest.get_model_info()["attention_pattern"] == "vertical_slash"
    assert dense.get_model_info()["attention_pattern"] == "dense"
    assert newest.max_length == max(900, newest.scorer.model_config.max_positions)
    sparse = newest.loglikelihood(requests)
    assert sparse == step.loglikelihood(requests)
    others = dense.loglikelihood(requests)
    # The long one differs. The short one is below vertical_slash.dense_below.
    assert abs(sparse[0][0] - others[0][0]) > 1e-6
    assert sparse[1][0] == pytest.approx(others[1][0], abs=1e-5)
    with pytest.raises(ValueError, match="write tokenizer=FOLDER"):
        TitanSparseLM(checkpoint=str(run))
