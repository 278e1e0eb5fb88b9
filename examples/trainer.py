"""Trains a Hugging Face model on packed documents, every sequence spread over the GPUs.

    torchrun --nproc-per-node 2 examples/trainer.py --tiny
    torchrun --nproc-per-node 8 examples/trainer.py --model FOLDER --bf16 --tokens 262144

The documents are the source files of Python's own library. The first command takes seconds, on two
CPU processes. What is marked (*) makes a script for one GPU one for long sequences on many.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, keep_attention, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
)

if __package__:  # python -m examples.trainer
    from .tiny import tiny_model
else:
    from tiny import tiny_model


class LongTrainer(ContextParallelTrainer, Trainer):
    """(*) A Trainer that gives each process its part of a batch."""


def packed_sequences(encode, tokens: int, count: int) -> list[dict]:
    """`count` sequences of several files each. position_ids begin at 0 with every file."""
    ids: list[int] = []
    positions: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        document = encode(path.read_text(encoding="utf-8", errors="replace"))[:tokens]
        ids += document
        positions += range(len(document))
        if len(ids) >= tokens * count:
            break
    sequences = []
    for start in range(0, tokens * count, tokens):
        input_ids = torch.tensor(ids[start : start + tokens])
        position_ids = torch.tensor(positions[start : start + tokens])
        # The first token of a file follows on nothing.
        labels = input_ids.masked_fill(position_ids == 0, -100)
        sequences.append(dict(input_ids=input_ids, position_ids=position_ids, labels=labels))
    return sequences


def main() -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tiny", action="store_true", help="a random model of bytes, on CPUs")
    which.add_argument("--model", help="a folder, or a name of the Hugging Face hub")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", type=int, default=1000, help="of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cp", type=int, help="processes that share a sequence (default: all)")
    parser.add_argument("--layout", default="striped")
    parser.add_argument("--sparse", action="store_true", help="vertical_slash at a recall of 0.95")
    parser.add_argument("--out", default="outputs/trainer")
    options = parser.parse_args()

    block_size = 16 if options.tiny else 128
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3 if options.tiny else 1e-5,
        bf16=options.bf16,
        use_cpu=options.tiny,
        fsdp=not options.tiny,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        # (*) Who shares a sequence. FSDP2 shards weights over all processes anyway.
        parallelism_config=ContextParallelConfig(
            cp_size=options.cp, layout=options.layout, block_size=block_size
        ),
    )
    # (*) Attention over the tokens of all of them.
    shortest = 16 * block_size  # Shorter documents are computed whole.
    pattern = VerticalSlash(recall=0.95, dense_below=shortest) if options.sparse else Dense()
    register(AttentionSettings(pattern, cp=args.parallelism_config.group()))

    if options.tiny:
        model = tiny_model()
        encode = lambda text: list(text.encode())  # noqa: E731
    else:
        name = options.model
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="titan_sparse")
        encode = AutoTokenizer.from_pretrained(name).encode
    # (*) The logits of a long sequence fit nowhere, and attention need not run twice.
    chunk_loss(model)
    model.gradient_checkpointing_enable(keep_attention())
    sequences = packed_sequences(encode, options.tokens, count=2 * options.steps)
    trainer = LongTrainer(model, args, train_dataset=sequences)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    main()
