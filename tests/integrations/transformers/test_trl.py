"""TRL's SFTTrainer, packed, under context parallelism: its log is that of one process."""

import random
from pathlib import Path

import pytest

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl.experimental import gkd  # noqa: E402

from tests.integrations.transformers.trainer_runs import (  # noqa: E402
    VOCAB,
    arguments,
    assert_trains_alike,
    numbers,
    read,
    tiny_model,
)
from titan_sparse.integrations.transformers import AttentionSettings, register  # noqa: E402
from titan_sparse.integrations.transformers.context_parallel import ContextParallelTrainer  # noqa: E402


class LongSFTTrainer(ContextParallelTrainer, trl.SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCAB - 1)} | {"<eos>": VOCAB - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def texts(count: int, seed: int) -> Dataset:
    numbers = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [f"w{numbers.randrange(VOCAB - 1)}" for _ in range(numbers.randint(5, 150))]
        # Completions are trained, prompts are not.
        cut = numbers.randint(1, len(words) - 1)
        rows.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])})
    return Dataset.from_list(rows)


def trainer(folder: Path, **changes) -> LongSFTTrainer:
    options = dict(
        max_length=250,
        packing=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        dataset_num_proc=None,
    )
    args = arguments(folder, trl.SFTConfig, **(options | changes))
    register(AttentionSettings(cp=args.parallelism_config.group()))
    return LongSFTTrainer(
        tiny_model(),
        args,
        train_dataset=texts(48, 1),
        eval_dataset=texts(20, 2),
        processing_class=tokenizer(),
    )


def packed(folder: Path) -> list[dict[str, float]]:
    made = trainer(folder)
    made.train()
    made.evaluate()
    return numbers(made)


def without_packing(folder: Path) -> list[dict[str, float]]:
    """Rows of a batch, padded, with the loss that weighs tokens by their probability. The last of
    an epoch's 48 rows is a batch of its own."""
    options = dict(per_device_train_batch_size=47, gradient_accumulation_steps=1)
    made = trainer(folder, packing=False, loss_type="dft", **options)
    made.train()
    return numbers(made)


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    assert_trains_alike(tmp_path, 2, [packed, without_packing])
    # The tokens of a step are those of its documents, without what fills a sequence.
    [first, *_] = read(tmp_path, "packed", 1)
    assert 0 < first["num_tokens"] <= 2 * 2 * 250


# GKD's class extends SFTTrainer.
@pytest.mark.parametrize("other", [trl.DPOTrainer, trl.GRPOTrainer, gkd.GKDTrainer])
def test_losses_of_whole_sequences_are_refused(other):
    with pytest.raises(TypeError, match=f"^{other.__name__} needs .* write Trainer or SFTTrainer"):

        class Wrong(ContextParallelTrainer, other):
            pass
