"""Small configurations of torchtitan's models, for its command line: --module tests....configs."""

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.gpt_oss import config_registry as gpt_oss_configs
from torchtitan.models.llama3 import config_registry as llama3_configs
from torchtitan.models.qwen3 import config_registry as qwen3_configs
from torchtitan.trainer import Trainer

LAYERS = 2


def _texts(_: str) -> datasets.Dataset:
    """Documents of 20 to 600 bytes."""
    lengths = [600, 20, 130, 400, 64, 190, 333, 50] * 20
    letters = "the quick brown fox jumps over the lazy dog. "
    texts = []
    for number, length in enumerate(lengths):
        text = letters[number % 40 :] + str(number * 7919)
        texts.append({"text": (text * 30)[:length]})
    return datasets.Dataset.from_list(texts)


DATASETS["bytes"] = DatasetConfig("", _texts, lambda sample: sample["text"])


def write_tokenizer(folder: str) -> None:
    """A token for each byte, in the file that torchtitan reads."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(f"{folder}/tokenizer.json")


def _small(config: Trainer.Config) -> Trainer.Config:
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.loss = config.loss.loss_fn if hasattr(config.loss, "loss_fn") else config.loss
    config.dataloader.dataset = "bytes"
    config.training.local_batch_size = 2
    config.training.seq_len = 512
    config.training.steps = 5
    config.training.mixed_precision_param = "float32"
    config.optimizer.implementation = "foreach"
    config.validator.enable = False
    config.activation_checkpoint = None
    return config


def llama3() -> Trainer.Config:
    return _small(llama3_configs.llama3_debugmodel())


def qwen3() -> Trainer.Config:
    return _small(qwen3_configs.qwen3_debugmodel())


def qwen3_moe() -> Trainer.Config:
    return _small(qwen3_configs.qwen3_moe_debug())


def gpt_oss() -> Trainer.Config:
    return _small(gpt_oss_configs.gpt_oss_debugmodel())
