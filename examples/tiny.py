"""The model and data of the examples with --tiny: a random model of bytes, and conversations about
sums.

Nothing is downloaded.
"""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

SHAPE = dict(
    vocab_size=257,  # Bytes, and the end of a turn.
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def tiny_model(hybrid: bool = False) -> PreTrainedModel:
    """hybrid: with linear attention in three of four layers, as in Qwen3.5."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, num_hidden_layers=2)
    if hybrid:
        heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
        sizes = dict(linear_key_head_dim=16, linear_value_head_dim=16)
        config = Qwen3_5TextConfig(**SHAPE, **heads, **sizes, num_hidden_layers=4)
    return AutoModelForCausalLM.from_config(config, attn_implementation="titan_sparse")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and <end>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    )
    return fast


def tiny_conversations(count: int) -> Dataset:
    """Conversations about addition, of one turn to forty."""
    numbers = random.Random(0)
    conversations = []
    for _ in range(count):
        messages = []
        for _ in range(numbers.randint(1, 40)):
            a, b = numbers.randint(0, 99), numbers.randint(0, 99)
            messages.append({"role": "user", "content": f"{a} + {b}?"})
            messages.append({"role": "assistant", "content": str(a + b)})
        conversations.append({"messages": messages})
    return Dataset.from_list(conversations)
