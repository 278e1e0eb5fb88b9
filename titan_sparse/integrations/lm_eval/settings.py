"""lm_eval's model_args -> a configuration, and the checkpoint to read."""

import os
from typing import Any, NamedTuple

from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.reading import require
from titan_sparse.evaluation.load import find_checkpoint
from titan_sparse.evaluation.settings import load_for_evaluation


class Settings(NamedTuple):
    """config: checked. checkpoint: a folder step-N, or None for config.model.initial_hf."""

    config: Config
    checkpoint: str | None


def settings_of(
    checkpoint: str | None,
    pretrained: str | None,
    config: str | None,
    attention: str | None,
    keys: dict[str, Any],
) -> Settings:
    """What the arguments of TitanSparseLM mean. keys: dotted, of the configuration.

    Raises ValueError, one line.
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
        # Nothing says how it was trained.
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
    return Settings(resolved, step)


def _config_of(step: str) -> str:
    """The config.toml of the run that wrote the folder step-N."""
    path = os.path.normpath(os.path.join(step, "..", "..", "config.toml"))
    require(
        os.path.isfile(path),
        f"model_args: there is no {path}; write config=FILE.toml of the run",
    )
    return path
