"""Trainer under context parallelism: losses, norms and evaluation are those of one process. What it
would get wrong is refused, in one line that says what to write."""

import functools

import peft
import pytest
import torch
from transformers import Trainer

from tests.integrations.transformers.families import pretended_ranks, tokens, with_ours
from tests.integrations.transformers.trainer_runs import (
    BLOCK,
    RUNS,
    WIDE,
    LongTrainer,
    Stream,
    arguments,
    assert_same,
    assert_trains_alike,
    numbers,
    parts,
    plain,
    read,
    streamed,
    tiny_model,
)
from tests.refusals import refused
from titan_sparse import ContextParallel
from titan_sparse.attention.masks import Causal
from titan_sparse.integrations.transformers import AttentionSettings, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    check_model,
    check_same_batch,
    check_trainer,
    shard_batch,
)


def test_two_processes_train_like_one(tmp_path):
    assert_trains_alike(tmp_path, 2, RUNS)
    # NEFTune's is uniform in +- alpha / sqrt(tokens * dims), of thousands of numbers.
    assert read(tmp_path, "noisy", 2) == [{"noise": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize("processes, runs", [(2, [streamed]), (3, [plain]), (4, WIDE)])
def test_more_processes_and_runs(tmp_path, processes, runs):
    assert_trains_alike(tmp_path, processes, runs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parallelism_config": None}, "write parallelism_config=ContextParallelConfig"),
        ({"average_tokens_across_devices": False}, "write True"),
        ({"label_smoothing_factor": 0.1}, "write 0"),
        ({"train_sampling_strategy": "batch_rebalance"}, 'write "random"'),
        ({"compute_metrics": dict}, r"write evaluate\(\)"),
        ({"preprocess_logits_for_metrics": dict}, r"write evaluate\(\)"),
        ({"compute_loss_func": dict}, r"override compute_loss\(\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(options, message, tmp_path):
    made = parts(arguments(tmp_path))
    (name,) = options
    if hasattr(made["args"], name):
        made["args"] = arguments(tmp_path, **options)
    else:
        made |= options
    with refused(message):
        LongTrainer(**made)


def test_streams(tmp_path, monkeypatch):
    made = parts(arguments(tmp_path), train_dataset=Stream())
    trainer = LongTrainer(**made)  # One rank to a sequence: whatever it gets is its own.
    monkeypatch.setattr(trainer.args.parallelism_config, "cp_size", 2)
    with refused('write accelerator_config={"dispatch_batches": False}'):
        check_trainer(trainer)


def test_evaluation(tmp_path):
    made = parts(arguments(tmp_path))
    trainer = LongTrainer(**made)
    with refused("add labels"):
        trainer.prediction_step(trainer.model, {"input_ids": torch.ones(1, 5)}, True)
    with refused("predict.* write evaluate"):
        trainer.predict(made["eval_dataset"])


def ours(name: str = "llama", ranks: int = 1):
    """A model with our attention, and its group, pretended where there are several ranks."""
    cp = ContextParallel(None, block_size=BLOCK) if ranks == 1 else pretended_ranks()
    register(AttentionSettings(cp=None if ranks == 1 else cp))
    model = with_ours(name)
    check_model(model, cp)
    return model, cp


def test_models(tmp_path):
    model = tiny_model()
    model.accepts_loss_kwargs = False
    with refused(r"forward\(\) takes \*\*kwargs"):
        LongTrainer(**parts(arguments(tmp_path), model=model))
    model, cp = ours()
    model.set_attn_implementation("sdpa")
    with refused('attn_implementation="sdpa" sees .*="titan_sparse"'):
        check_model(model, cp)
    model, cp = ours("mixtral")
    model.config.output_router_logits = True
    with refused("write router_aux_loss_coef=0.0"):
        check_model(model, cp)
    model, cp = ours()
    model.loss_function = torch.nn.functional.cross_entropy
    with refused("AutoModelForCausalLM"):
        check_model(model, cp)


def test_attention_of_other_ranks():
    words = "register\\(AttentionSettings\\(cp=args"
    model, two = ours(ranks=2)
    one = ContextParallel(None, block_size=BLOCK)
    with refused(words):
        check_model(model, one)
    register()
    with refused(words):
        check_model(model, two)
    # One rank needs no group.
    check_model(model, one)


@pytest.mark.parametrize(
    "adapter",
    [
        peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1, 2]),
    ],
)
def test_adapters_that_look_at_whole_sequences(adapter):
    model, cp = ours()
    model = peft.get_peft_model(model, adapter)
    with refused(f"{type(adapter).__name__} .* write LoraConfig without"):
        check_model(model, cp)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_by_the_length_of_a_sequence(kind):
    model, cp = ours(ranks=2)
    for parameters in ({"rope_type": kind}, {"full_attention": {"rope_type": kind}}):
        model.config.rope_parameters = parameters
        words = f'rope_type "{kind}" .* write rope_type="yarn"'
        with refused(words):
            check_model(model, cp)
        # Without a Trainer, too.
        with refused(words):
            model(torch.zeros(1, 2 * BLOCK, dtype=torch.int64))


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_loss_that_ignores_shifted_labels(own_loss, tmp_path):
    """Old models call loss_function() without further arguments, or compute a mean of their own."""
    made = parts(arguments(tmp_path))
    forward = made["model"].forward

    @functools.wraps(type(made["model"]).forward)
    def ignoring(*args, shift_labels=None, **kwargs):
        out = forward(*args, **kwargs)
        if own_loss:
            labels = kwargs["labels"].flatten()
            out.loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels)
        return out

    made["model"].forward = ignoring
    trainer = LongTrainer(**made)
    with refused("does not hand shift_labels to its loss"):
        trainer.train()


def test_sizes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    with refused("do not divide 6 processes; start .*-node=4"):
        ContextParallelConfig(cp_size=4)
    for sizes in ({"cp_size": 0}, {"dp_replicate_size": 0}):
        with refused("start torchrun"):
            ContextParallelConfig(**sizes)
    with refused("block_size=100 is not a power of two"):
        ContextParallelConfig(block_size=100)
    config = ContextParallelConfig(cp_size=3)
    assert (config.dp_shard_size, config.cp_size) == (2, 3)
    config = ContextParallelConfig(dp_replicate_size=2)
    assert (config.dp_shard_size, config.cp_size) == (1, 3)
    assert config.to_json().items() >= {("cp", 3), ("layout", "striped")}  # Trainer logs it.


def test_processes_that_accelerate_does_not_see(tmp_path, monkeypatch):
    """torchrun's processes on CPUs train independently unless use_cpu is set."""
    made = parts(arguments(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = ContextParallelConfig(block_size=BLOCK)
    monkeypatch.setenv("WORLD_SIZE", "1")
    config.build_device_mesh = lambda device_type: None
    made["args"].parallelism_config = config
    with refused("write use_cpu=True"):
        LongTrainer(**made)


def test_a_trainer_alone_is_as_it_was(tmp_path):
    """On one process the losses equal those of a Trainer with transformers'
    own attention and loss."""
    made = parts(arguments(tmp_path))
    trainer = LongTrainer(**made)
    trainer.train()
    others = parts(arguments(tmp_path))
    others["model"].set_attn_implementation("eager")
    others["args"] = arguments(tmp_path, parallelism_config=None)
    wanted = Trainer(**others)
    wanted.train()
    assert_same(numbers(trainer), numbers(wanted))


def test_the_trainer_comes_second():
    with pytest.raises(TypeError, match=r"write class Wrong\(ContextParallelTrainer, Trainer\)"):

        class Wrong(Trainer, ContextParallelTrainer):
            pass


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input_ids": None}, "write input_ids in place of inputs_embeds"),
        ({"labels": None}, "write a collator that adds labels"),
        ({"labels": torch.zeros(1, 7)}, r"labels \[1, 7\] beside input_ids \[1, 50\]"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "cut pixel_values .*; drop it"),
        ({"completion_mask": torch.ones(1, 50)}, "cut completion_mask .*; drop it"),
        ({"attention_mask": Causal()}, "not Causal; leave it out, and write position_ids"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes, message):
    batch = {"input_ids": tokens(1, 50), "labels": tokens(1, 50)} | changes
    with refused(message):
        shard_batch(batch, pretended_ranks())


def test_other_batches_of_one_sequence_are_refused():
    cp = pretended_ranks()
    ids = tokens(1, 50)
    cp.all_gather = lambda facts: torch.stack([facts, facts])
    check_same_batch(ids, ids, cp)
    cp.all_gather = lambda facts: torch.stack([facts, facts + torch.tensor([0, 0, 1, 0])])
    with refused("different batches"):
        check_same_batch(ids, ids, cp)
    # The same tokens in another order are another batch.
    found = []
    cp.all_gather = lambda facts: found.append(facts) or facts[None]
    check_same_batch(ids, ids, cp)
    check_same_batch(ids.flip(1), ids, cp)
    assert not torch.equal(*found)
