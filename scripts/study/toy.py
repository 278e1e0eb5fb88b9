"""The toy study's model: a small Llama of random weights, with a tokenizer, as a folder."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512


def write_toy_model(folder: Path) -> None:
    """Write it, as scripts.study.real_model writes the real one, unless it is there."""
    if (folder / "config.json").is_file():
        return
    import transformers

    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = (path.read_text(encoding="utf-8") for path in sorted(stdlib.glob("a*.py")))
    train_tokenizer(texts, VOCAB_SIZE, folder / "tokenizer.json")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        # Long queries: attention is not even, so that a pattern can leave something out.
        layer.self_attn.q_proj.weight.data *= 8
    # Last, config.json: a folder with it is whole.
    model.save_pretrained(folder)


def train_tokenizer(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """A byte-level BPE of at most vocab_size tokens; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
