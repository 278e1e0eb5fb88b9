"""torchtitan's own program with our attention, on gloo ranks, beside softmax over a boolean mask.

Runs begin with the weights of a seed checkpoint, since random weights depend on how they are sharded.
"""

import json

import pytest
import torch

from tests.distributed import run_program
from tests.integrations.torchtitan.program import main

if torch.__version__ < "2.14":
    pytest.skip("torchtitan 0.3 needs torch 2.14", allow_module_level=True)

HERE = "tests.integrations.torchtitan.configs"
OURS = "titan_sparse.integrations.torchtitan"
PLAIN = f"--override.imports {HERE}.plain"
DENSE = f'--override.imports {OURS}.dense={{"block_size":64}} {OURS}.log_attention'
SPARSE_OPTIONS = '{"block_size":32,"dense_below":64,"recall":0.6}'
SPARSE = f"--override.imports {OURS}.vertical_slash={SPARSE_OPTIONS} {OURS}.log_attention"
SAVED = f"{OURS}.save_attention"
CP = "--parallelism.context_parallel_degree 2"
TP = "--parallelism.tensor_parallel_degree 2"
PP = "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B"
FSDP = "--training.local_batch_size 1"
SEED = "--checkpoint.create_seed_checkpoint"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """train(ranks, model, {name: words}): the logged steps of each run."""
    folder = tmp_path_factory.mktemp("runs")
    from tests.integrations.torchtitan.configs import write_tokenizer

    write_tokenizer(str(folder / "tokenizer"))

    def train(ranks: int, model: str, lines: dict[str, str], fails: bool = False) -> dict:
        common = f"--module {HERE} --config {model} --hf_assets_path {folder}/tokenizer"
        seeded = f"--checkpoint.initial_load_path {folder}/{model}/checkpoint/step-0"
        words = {}
        if not (folder / model).exists():
            run_program(1, main, [str(folder), json.dumps({model: f"{common} {SEED}"})])
        for name, line in lines.items():
            words[name] = f"{common} {seeded} {line}"
        printed = run_program(ranks, main, [str(folder), json.dumps(words)])
        found = {}
        for line in printed.splitlines():
            if line.startswith("RUN "):
                run = json.loads(line[4:])
                if fails:
                    found[run["name"]] = run["error"]
                else:
                    assert run["error"] is None, printed
                    found.setdefault(run["name"], []).append(run["steps"])
        return found

    return train


def assert_equal(got: list[list[dict]], want: list[list[dict]], loss: float = 2e-6) -> None:
    """got, want: the steps of each rank."""
    assert len(want[0]) == 3
    # Only the last stage of a pipeline knows the loss.
    steps = [max(ranks, key=lambda step: step["loss"]) for ranks in zip(*got)]
    for ours, theirs in zip(steps, want[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_dense_is_softmax_and_ranks_are_one(runs):
    one = runs(1, "llama3", {"plain": PLAIN, "dense": DENSE, "sparse": SPARSE})
    assert_equal(one["dense"], one["plain"])
    lines = {
        # torchtitan's gradient norm over several ranks differs from that of one by 1e-4.
        "plain2": f"{PLAIN} {FSDP}",
        "cp": f"{DENSE} {CP}",
        "sparse_fsdp": f"{SPARSE} {FSDP}",
        "sparse_cp": f"{SPARSE} {CP}",
    }
    two = runs(2, "llama3", lines)
    assert_equal(two["cp"], two["plain2"])
    assert_equal(two["sparse_cp"], two["sparse_fsdp"])
    for step, of_one, over_two in zip(two["plain2"][0], one["sparse"][0], two["sparse_cp"][0]):
        assert step["loss"] != pytest.approx(of_one["loss"], rel=2e-6)
        assert over_two["loss"] == pytest.approx(of_one["loss"], rel=2e-6)
        density = of_one["titan_sparse/density"]
        assert 0.3 < density < 0.9
        assert over_two["titan_sparse/density"] == pytest.approx(density)
        assert over_two["titan_sparse/imbalance"] > 1
        assert 0.6 < over_two["titan_sparse/recall"] < 1
    assert one["dense"][0][0]["titan_sparse/recall"] == pytest.approx(1)


@pytest.mark.slow
def test_other_axes(runs):
    two = runs(2, "llama3", {"plain2": f"{PLAIN} {FSDP}", "tp": f"{DENSE} {TP}"})
    assert_equal(two["tp"], two["plain2"])
    lines = {
        "cp_tp": f"{DENSE} {CP} {TP}",
        "cp_pp": f"{DENSE} {CP} {PP}",
        "cp_fsdp": f"{DENSE} {CP} {FSDP}",
        "sparse_cp_tp": f"{SPARSE} {CP} {TP}",
    }
    four = runs(4, "llama3", lines)
    for name in ("cp_tp", "cp_pp", "cp_fsdp"):
        assert_equal(four[name], two["plain2"])
    sparse = runs(2, "llama3", {"sparse_tp": f"{SPARSE} {TP}"})["sparse_tp"]
    assert_equal(four["sparse_cp_tp"], sparse)
    density = sparse[0][0]["titan_sparse/density"]
    assert four["sparse_cp_tp"][3][0]["titan_sparse/density"] == pytest.approx(density)


@pytest.mark.slow
def test_checkpointing_and_compile(runs):
    lines = {"plain": PLAIN}
    for kind in ("selective", "full"):
        lines[kind] = f"{DENSE} / activation_checkpoint:{kind}"
        lines[f"{kind}_saved"] = f"{DENSE} {SAVED} / activation_checkpoint:{kind}"
        lines[f"{kind}_compiled"] = f"{DENSE} {SAVED} --compile.enable / activation_checkpoint:{kind}"
    one = runs(1, "llama3", lines)
    for name in lines:
        assert_equal(one[name], one["plain"])
    lines = {
        "sparse": f"{SPARSE} {FSDP}",
        "compiled": f"{SPARSE} {SAVED} {CP} --compile.enable / activation_checkpoint:full",
    }
    two = runs(2, "llama3", lines)
    assert_equal(two["compiled"], two["sparse"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_other_models(runs, model):
    """Experts over two ranks; GPT-OSS has learned sinks and windows."""
    expert = "--parallelism.expert_parallel_degree 2" if model != "qwen3" else ""
    lines = {"plain2": f"{PLAIN} {FSDP}", "cp": f"{DENSE} {CP} {expert}"}
    two = runs(2, model, lines)
    # Experts choose by scores that differ by rounding.
    assert_equal(two["cp"], two["plain2"], 1e-5 if expert else 2e-6)


@pytest.mark.slow
def test_resume(runs):
    words = f"{SPARSE} {CP} --training.steps 4 --checkpoint.interval 2 --checkpoint.load_step"
    two = runs(2, "llama3", {"whole": words + " -1"})
    again = runs(2, "llama3", {"whole#2": words + " 2"})
    assert [step["step"] for step in again["whole#2"][0]] == [3, 4]
    assert again["whole#2"][0] == two["whole"][0][2:]
