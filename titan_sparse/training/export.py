"""Write a checkpoint as a Hugging Face folder, for transformers' from_pretrained()."""

import functools
import json
import logging
from typing import Any

import torch

from titan_sparse.config import Config
from titan_sparse.data.chat_template import exported_files
from titan_sparse.data.endings import text_ends
from titan_sparse.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from titan_sparse.models.config import resolve_adapters
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import export_weights
from titan_sparse.models.huggingface_files import files_to_copy
from titan_sparse.models.lora import export_adapter, merged
from titan_sparse.training.checkpoint.reader import read_into, read_metadata

logger = logging.getLogger("titan_sparse")


def export(
    checkpoint: str, config: Config, out: str, dtype: torch.dtype | None = None, merge: bool = False
) -> None:
    """Write the weights of a checkpoint, or its adapters for PEFT, to the new folder `out`. One
    process reads what all have saved.

    config: the run's. dtype: None for that of training, and for adapters float32. merge: adapters go
    into the weights of model.initial_hf. Raises ValueError, one line, for what cannot be exported.
    """
    model = config.model
    shape = resolve(**vars(model))
    if shape.tied_embeddings and "lm_head.weight" in read_metadata(checkpoint).state_dict_metadata:
        # Its weights, which showed that the head is not tied, have gone since.
        raise ValueError(
            f"{checkpoint} has lm_head.weight, but {model.initial_hf}/config.json says "
            "tie_word_embeddings = true; write false there"
        )
    tokenizer = open_tokenizer(config)
    files = exported_files(config.data, model.initial_hf, tokenizer)
    ends = text_ends(config, tokenizer)
    # As transformers writes it: a list only if there are several.
    stop = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    generation = {**_generation_config(config), **stop}
    if tokenizer.padding != tokenizer.end_of_document:
        generation.setdefault("pad_token_id", tokenizer.padding)
    files["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
    read = functools.partial(read_into, checkpoint=checkpoint, alone=True)
    trained = getattr(torch, config.training.dtype)
    adapters = resolve_adapters(shape, **vars(config.lora))
    if adapters and not merge:
        dtype = dtype or torch.promote_types(trained, torch.float32)
        export_adapter(checkpoint, read, out, shape, adapters, dtype, model.initial_hf, files)
        return
    if adapters:
        read = merged(read, shape, adapters, model.initial_hf)
    source = model.initial_hf
    export_weights(
        checkpoint, read, out, shape, dtype or trained, source, files=files, entries=stop
    )

    _check_tokenizer(out, tokenizer)


def _check_tokenizer(out: str, tokenizer: Tokenizer) -> None:
    """Warn if transformers reads other tokens from the folder `out`: for some values of model_type it
    takes the class of that family, whatever the tokenizer's files say."""
    if tokenizer.folder is None or FileTokenizer(out, False).extends(tokenizer):
        return
    logger.warning(
        "AutoTokenizer reads other tokens from %s than the run had, because model_type in its "
        "config.json chooses the class; read its tokenizer from a folder of its own",
        out,
    )


def _generation_config(config: Config) -> dict[str, Any]:
    """The content of generation_config.json of model.initial_hf; empty without one."""
    path = files_to_copy(config.model.initial_hf).get("generation_config.json")
    return json.loads(path.read_text(encoding="utf-8-sig")) if path else {}
