"""Print an example configuration with comments, to begin with.

    titan-sparse init pretrain|sft|lora > run.toml

pretrain trains on text, from random weights as it stands. sft trains all weights of a model on
chats, and lora adapters: write your folders and files where the example names some. Then start
torchrun --standalone --nproc-per-node 1 -m titan_sparse.train --config run.toml,
first with --dry-run.
"""

import textwrap
from operator import attrgetter
from typing import Any

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config import Config, field_docs
from titan_sparse.config.reading import KINDS, SECTIONS
from titan_sparse.options.values import as_toml

_MODEL = {"model.initial_hf": "MODEL_FOLDER"}
_CHATS = {"data.source": "chats.jsonl", "data.format": "messages"}

_ALL: dict[str, Any] = {
    "training.steps": 1000,
    "training.seq_len": 32768,
    "training.local_batch_size": 1,
    "training.gradient_accumulation_steps": 1,
    "training.dtype": "bfloat16",
    "parallelism.cp": 1,
    "attention.mask": "documents",
    "attention.pattern": "vertical_slash",
    "attention.vertical_slash.recall": 0.95,
    "attention.vertical_slash.dense_below": 4096,
    "lr_scheduler.min_lr_factor": 0.1,
    "activation_checkpoint.mode": "full",
    "compile.enable": False,
    "checkpoint.enable": True,
    "checkpoint.interval": 200,
    "metrics.log_every": 10,
    "validation.enable": True,
    "validation.every": 200,
    "validation.source": "",
    "validation.prompt": "",
}
"""Keys of every example, also where they have their defaults: what a user changes first."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "pretrain": {
        "model.flavour": "qwen2.5-0.5b",
        "model.vocab_size": 320,
        "data.source": "python",
        "data.join_packages": True,
        "data.tokenizer": "bytes",
        "optimizer.lr": 5e-4,
    },
    "sft": {**_MODEL, **_CHATS, "optimizer.lr": 1e-5, "optimizer.weight_decay": 0.0},
    "lora": {
        **_MODEL,
        **_CHATS,
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.targets": "all-linear",
        "optimizer.lr": 2e-4,
        "optimizer.weight_decay": 0.0,
    },
}
_ABOUT = {
    "pretrain": (
        "Train a model of 0.36 B parameters from random weights on the Python files of this machine, as "
        "bytes. To go on from a model, write model.initial_hf instead of flavour, vocab_size, and "
        "data.tokenizer."
    ),
    "sft": "Train all weights of a model on chats.",
    "lora": "Train adapters of a model on chats. Needs titan-sparse[huggingface].",
}


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=list(EXAMPLES), metavar="pretrain|sft|lora")
    print(example(parser.parse_args(words).kind), end="")
    return 0


def example(kind: str) -> str:
    """The configuration as TOML, in the order of --help, each key below what it means."""
    values = {**_ALL, "training.output_dir": f"outputs/{kind}", **EXAMPLES[kind]}
    lines = [
        *_comment(_ABOUT[kind]),
        "#   torchrun --standalone --nproc-per-node 1 -m titan_sparse.train --config run.toml",
        "# A default stands in parentheses. titan-sparse train --help lists all other keys.",
    ]
    section = ""
    for key in KINDS:
        if key not in values:
            continue
        section_now, _, name = key.rpartition(".")
        if section_now != section:
            section = section_now
            lines += ["", f"[{section}]"]
        meaning = field_docs(SECTIONS[section])[name]
        default = as_toml(attrgetter(key)(Config()))
        lines += [*_comment(f"{meaning} ({default})"), f"{name} = {as_toml(values[key])}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")
