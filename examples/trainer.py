"""Trains a Hugging Face model on packed documents, with every sequence spread over the GPUs.

    torchrun --nproc-per-node 2 examples/trainer.py --tiny
    torchrun --nproc-per-node 8 examples/trainer.py --model Qwen3-0.6B --bf16 --tokens 262144

The documents are the source files of Python's own library. The first command takes seconds on two
CPU processes. A script for one GPU becomes one for many by three lines, marked "long" below.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionSettings,
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
    register,
)


class LongTrainer(ContextParallelTrainer, Trainer):  # long: it cuts batches
    pass


class PackedFiles(Dataset):
    """Sequences of `tokens` tokens, each of several files. position_ids begin at 0 in each file."""

    def __init__(self, encode, tokens: int, count: int):
        ids, positions = [], []
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            document = encode(path.read_text(encoding="utf-8", errors="replace"))[:tokens]
            ids += document
            positions += range(len(document))
            if len(ids) >= tokens * count:
                break
        self.ids = torch.tensor(ids).split(tokens)[:count]
        self.positions = torch.tensor(positions).split(tokens)[:count]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        # A file's first token is nobody's successor.
        labels = self.ids[i].masked_fill(self.positions[i] == 0, -100)
        return {"input_ids": self.ids[i], "position_ids": self.positions[i], "labels": labels}


def main() -> list[float]:
    """Returns the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a name of the Hugging Face hub")
    parser.add_argument("--tiny", action="store_true", help="a random model of bytes, on CPUs")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cp", type=int, help="processes that share a sequence (default: all)")
    parser.add_argument("--layout", default="striped")
    parser.add_argument("--sparse", action="store_true", help="vertical_slash at a recall of 0.9")
    parser.add_argument("--out", default="outputs/trainer")
    options = parser.parse_args()
    if options.tiny == bool(options.model):
        parser.error("write either --tiny or --model FOLDER")

    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3 if options.tiny else 1e-5,
        bf16=options.bf16,
        use_cpu=options.tiny,
        fsdp=not options.tiny,
        fsdp_config={"activation_checkpointing": True},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        parallelism_config=ContextParallelConfig(  # long: who shares a sequence
            cp_size=options.cp, layout=options.layout, block_size=16 if options.tiny else 128
        ),
    )
    pattern = VerticalSlash(recall=0.9) if options.sparse else Dense()
    cp = args.parallelism_config.group()
    register(AttentionSettings(pattern, cp))  # long: attention over all of their tokens

    if options.tiny:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="titan_sparse")

        def encode(text: str) -> list[int]:
            return list(text.encode())
    else:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="titan_sparse"
        )
        encode = AutoTokenizer.from_pretrained(options.model).encode
    chunk_loss(model)
    dataset = PackedFiles(encode, options.tokens, count=2 * options.steps)
    trainer = LongTrainer(model, args, train_dataset=dataset)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
