"""What lm_eval's arguments mean: a configuration, the checkpoint to read, and its tokenizer.

Tokens are as lm_eval's tasks expect them: with exactly one begin-of-text token.
"""

import json
import os
from pathlib import Path
from typing import Any

from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.reading import require
from titan_sparse.config.sources import tokenizer_file
from titan_sparse.data.tokenizer import ByteTokenizer, Tokenizer
from titan_sparse.evaluation.load import find_checkpoint
from titan_sparse.evaluation.settings import load_for_evaluation


def settings_of(
    checkpoint: str | None,
    pretrained: str | None,
    config: str | None,
    attention: str | None,
    keys: dict[str, Any],
) -> tuple[Config, str | None]:
    """What the arguments of TitanSparseLM mean: the checked configuration, and the checkpoint to
    read (a folder step-N), or None for config.model.initial_hf.

    keys: dotted, of the configuration. Raises ValueError, one line.
    """
    require(
        (checkpoint is None) != (pretrained is None),
        "model_args: write checkpoint=RUN (its folder, or its checkpoint/step-N) or "
        "pretrained=FOLDER of Hugging Face, one of the two",
    )
    require(
        attention in (None, "dense", "as_trained"),
        f'model_args: attention={attention} is unknown; write "dense" or "as_trained"',
    )
    step = None
    if checkpoint is not None:
        step = find_checkpoint(checkpoint)
        config = config or _config_of(step)
    words = [] if config is None else ["--config", config]
    dense = attention == "dense"
    if config is None:
        # No configuration says how the model was trained.
        require(
            attention != "as_trained",
            "model_args: attention=as_trained needs config=FILE.toml of a run; write it, or "
            "attention.pattern=NAME",
        )
        dense = dense or "attention.pattern" not in keys
        keys = {"data.tokenizer": pretrained} | keys
    for key, value in keys.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"--{key}={text}")
    resolved = load_for_evaluation(words, pretrained, dense)
    check(resolved, *world_from_environment())
    return resolved, step


def _config_of(step: str) -> str:
    path = os.path.normpath(os.path.join(step, "..", "..", "config.toml"))
    require(
        os.path.isfile(path),
        f"model_args: there is no {path}; write config=FILE.toml of the run",
    )
    return path


class ByteText:
    """data.tokenizer = "bytes", with the methods of transformers' tokenizers that are called
    here."""

    name_or_path = "bytes"
    bos_token_id = None
    eos_token_id = ByteTokenizer.end_of_document
    chat_template = None

    def __init__(self) -> None:
        self._tokenizer = ByteTokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """There are no special tokens to add."""
        return self._tokenizer.encode(text).tolist()

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """Never includes the end of a document, which is not text."""
        return self._tokenizer.decode(tokens)

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        """Raises ValueError: bytes have no template."""
        raise ValueError(
            'data.tokenizer = "bytes" has no chat template; leave --apply_chat_template out, or '
            "write tokenizer=FOLDER of the checkpoint's own"
        )


def open_text(name: str, tokenizer: Tokenizer) -> Any:
    """transformers' tokenizer of data.tokenizer = `name`, or ByteText.

    tokenizer: ours of the same name; it knows the end of a document where no file names it.
    """
    if name == "bytes":
        return ByteText()
    # Only where needed: it loads slowly.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = tokenizer_file(name)
    if path.with_name("tokenizer_config.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(
                str(path.parent), local_files_only=True, trust_remote_code=False
            )
        except ValueError as error:
            raise ValueError(
                f"transformers cannot read the tokenizer of {path.parent}, where code of its own is not "
                "run; write tokenizer=FOLDER with its tokenizer.json alone"
            ) from error
    text = PreTrainedTokenizerFast(tokenizer_file=str(path), name_or_path=str(path.parent))
    text.eos_token = text.convert_ids_to_tokens(tokenizer.end_of_document)
    return text


def encode(text: Any, string: str, prefix: int, adds: bool) -> list[int]:
    """Token ids of a string, with the special tokens that the tokenizer adds.

    A string that begins with the token `prefix` already, as chat templates write it, gets no second
    one. adds: whether the others get any.
    """
    plain = text.encode(string, add_special_tokens=False)
    if not adds or plain[:1] == [prefix]:
        return plain
    return text.encode(string, add_special_tokens=True)


def end_tokens(text: Any, folders: list[str]) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and those of the folders' generation_config.json, as
    chat models have several."""
    found = set()
    if text.eos_token_id is not None:
        found.add(text.eos_token_id)
    for folder in folders:
        path = Path(folder).expanduser() / "generation_config.json"
        if path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8-sig")).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return frozenset(found)
