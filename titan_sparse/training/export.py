"""Write a checkpoint as a Hugging Face folder, for transformers' from_pretrained()."""

import functools

import torch

from titan_sparse.config import Config
from titan_sparse.data.chat_template import exported_files
from titan_sparse.models.config import resolve_adapters
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import export_weights
from titan_sparse.models.lora import export_adapter, merged
from titan_sparse.training.checkpoint.reader import read_into, read_metadata


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
    files = exported_files(config.data, model.initial_hf)
    read = functools.partial(read_into, checkpoint=checkpoint, alone=True)
    trained = getattr(torch, config.training.dtype)
    adapters = resolve_adapters(shape, **vars(config.lora))
    if adapters and not merge:
        dtype = dtype or torch.promote_types(trained, torch.float32)
        export_adapter(checkpoint, read, out, shape, adapters, dtype, model.initial_hf, files)
        return
    if adapters:
        read = merged(read, shape, adapters, model.initial_hf)
    export_weights(checkpoint, read, out, shape, dtype or trained, model.initial_hf, files=files)
