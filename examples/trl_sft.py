"""Supervised fine-tuning by TRL on packed conversations, every sequence spread over the GPUs.

    torchrun --nproc-per-node 2 examples/trl_sft.py --tiny
    torchrun --nproc-per-node 2 examples/trl_sft.py --tiny --hybrid
    torchrun --nproc-per-node 8 examples/trl_sft.py --model FOLDER --data FILE.jsonl --bf16 \
        --tokens 262144

A line of FILE is {"messages": [{"role": "user", "content": ...}, ...]}. The first two commands take
seconds, on two CPU processes. Hybrid models such as Qwen3.5 need nothing else. What is marked (*)
makes a script for one GPU one for long sequences on many. TRL itself refuses to pack under context
parallelism.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, keep_attention, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
)

if __package__:  # python -m examples.trl_sft
    from .tiny import tiny_conversations, tiny_model, tiny_tokenizer
else:
    from tiny import tiny_conversations, tiny_model, tiny_tokenizer


class LongSFTTrainer(ContextParallelTrainer, SFTTrainer):
    """(*) An SFTTrainer that gives each process its part of a batch."""


def main() -> SFTTrainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tiny", action="store_true", help="a random model of bytes, on CPUs")
    which.add_argument("--model", help="a folder, or a name of the Hugging Face hub")
    parser.add_argument("--hybrid", action="store_true", help="with --tiny: like Qwen3.5")
    parser.add_argument("--data", help="a .jsonl file of conversations, for --model")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", type=int, default=1000, help="of a packed sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cp", type=int, help="processes that share a sequence (default: all)")
    parser.add_argument("--layout", default="striped")
    parser.add_argument("--sparse", action="store_true", help="vertical_slash at a recall of 0.95")
    parser.add_argument("--out", default="outputs/trl_sft")
    options = parser.parse_args()
    if options.model and not options.data:
        parser.error("--model trains on --data FILE.jsonl; write it")

    block_size = 16 if options.tiny else 128
    args = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        max_length=options.tokens,
        packing=True,
        assistant_only_loss=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3 if options.tiny else 1e-5,
        bf16=options.bf16,
        gradient_checkpointing=False,
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
        model, tokenizer = tiny_model(options.hybrid), tiny_tokenizer()
        dataset = tiny_conversations(200)
    else:
        name = options.model
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="titan_sparse")
        tokenizer = AutoTokenizer.from_pretrained(name)
        dataset = load_dataset("json", data_files=options.data, split="train")
    model.gradient_checkpointing_enable(keep_attention())  # (*) Attention need not run twice.
    trainer = LongSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    main()
