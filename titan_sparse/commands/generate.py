"""Write text with a trained model: continue a prompt, or answer it where the model
was trained on chats.

    titan-sparse generate RUN_OR_FOLDER "PROMPT" [--tokens 200] [--temperature 0.7] [--as chat|text]

RUN_OR_FOLDER is the output_dir of a run, for its newest checkpoint, or its checkpoint/step-N, or a
Hugging Face folder. A run attends to the prompt as it was trained, and a folder densely. New tokens
always see all keys. With a chat template, the prompt is a user's message: of a folder, and of a run
that was trained on messages. --as says otherwise. The text goes to the terminal as it is written,
and ends with a special token, such as the end of a turn. Other words are options of the
configuration, as train.py takes them. Under torchrun all ranks share the work.
"""

import argparse
import contextlib
from pathlib import Path

import numpy as np
import torch.distributed as dist

from titan_sparse.commands import parser_of, positive, refuses
from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.changes import read_saved
from titan_sparse.config.ignored import of_other_patterns
from titan_sparse.config.reading import load_config, refuse_ignored, require
from titan_sparse.data import Tokenizer, open_tokenizer
from titan_sparse.data.chat_template import ChatTemplate, load_template
from titan_sparse.evaluation.generation import decoded, encode_prompt, refuse_linear_layers, stream
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface_files import local_folder
from titan_sparse.training.faults.process_groups import choose_device
from titan_sparse.training.load import (
    build_scorer,
    find_checkpoint,
    find_config,
    load_for_evaluation,
)


@refuses
def main(words: list[str]) -> int:
    args, rest = parse(words)
    named = next((word for word in rest if word.startswith("--data.chat_template")), "")
    key = named.removeprefix("--").partition("=")[0]
    require(
        not named or args.style != "text", f"{key} would be ignored with --as text; leave it out"
    )
    style = args.style or ("chat" if named else None)
    args.run_or_folder = local_folder(args.run_or_folder, "RUN_OR_FOLDER", weights=True)
    folder = Path(args.run_or_folder)
    is_hf = (folder / "config.json").is_file()
    require(
        not (folder / "adapter_config.json").is_file(),
        f"{folder} holds adapters alone; write the run, or what export_hf --merge wrote",
    )
    checkpoint = None if is_hf else find_checkpoint(args.run_or_folder)
    config = of_folder(folder, rest) if is_hf else of_run(args.run_or_folder, rest)
    check(config, *world_from_environment())
    refuse_linear_layers(resolve(**vars(config.model)))
    tokenizer = open_tokenizer(config)
    template = template_of(config, tokenizer, style, is_hf or is_of_chats(checkpoint))
    refuse_ignored(
        rest,
        {
            **of_other_patterns(config),
            "training.seq_len": "as the prompt is as long as it is",
            "training.loss_chunk_tokens": "as there is no loss",
            "data.add_bos": "" if config.data.add_bos or not template else "with a chat template",
        },
    )
    prompt = encode_prompt(args.prompt, tokenizer, template, config.data.add_bos)
    scorer = build_scorer(config, checkpoint, tokenizer)
    ends = scorer.ends
    columns = stream(
        scorer, [prompt], args.tokens, lambda text: text[-1] in ends, args.temperature, args.seed
    )
    try:
        for text in decoded(columns, tokenizer, ends):
            if dist.get_rank() == 0:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        if dist.get_rank() == 0:
            print(flush=True)
    return 0


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("run_or_folder", metavar="RUN_OR_FOLDER")
    add("prompt", metavar="PROMPT")
    add("--tokens", type=positive, default=200, help="most tokens to write")
    add(
        "--temperature",
        type=temperature,
        default=0.0,
        help="0 takes the most likely token; above, tokens are drawn",
    )
    add("--seed", type=int, default=0, help="of the drawn tokens")
    add("--as", dest="style", choices=["chat", "text"], help="answer the prompt, or continue it")
    return parser.parse_known_args(words)


def temperature(text: str) -> float:
    """An argparse type."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < np.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a temperature; write 0 or more")


def of_run(path: str, words: list[str]) -> Config:
    """The configuration of a run or checkpoint, with `words` over it. Raises ConfigError."""
    words = ["--config", find_config(path), *words]
    return load_for_evaluation(words, None, dense=False, checkpoint=path, reads_text=False)


def of_folder(folder: Path, words: list[str]) -> Config:
    """The configuration for a Hugging Face folder. Raises ConfigError."""
    defaults = ["--attention.pattern=dense"]
    if choose_device(load_config(words).training.device).type == "cpu":
        # bfloat16 is slow on most CPUs.
        defaults.append("--training.dtype=float32")
    # Of two words for a key the last counts.
    words = [*defaults, *words]
    return load_for_evaluation(words, str(folder), dense=False, reads_text=False)


def is_of_chats(checkpoint: str) -> bool:
    """True if the run was trained on messages, also where its data are prepared tokens."""
    saved = read_saved(checkpoint)
    parts = saved.origin.get("data", []) if saved else []
    return any(part.get("format") == "messages" for part in parts)


def template_of(
    config: Config, tokenizer: Tokenizer, style: str | None, is_chat: bool
) -> ChatTemplate | None:
    """The chat template that the prompt goes through; None: it is continued as it stands."""
    if style == "text" or not (style or is_chat):
        return None
    try:
        return load_template(config.data, config.model.initial_hf, tokenizer)
    except ValueError:
        # Many folders have none. What was asked for must be found.
        if style or config.data.chat_template:
            raise
        return None
