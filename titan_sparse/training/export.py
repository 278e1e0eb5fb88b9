"""Write a checkpoint as a Hugging Face folder, for transformers' from_pretrained()."""

import dataclasses
import functools
import json
import logging
import os

import torch
import torch.distributed as dist

from titan_sparse.config import Config, Model
from titan_sparse.data.chat_template import exported_files
from titan_sparse.data.endings import text_ends
from titan_sparse.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import export_weights, exported_config, json_bytes
from titan_sparse.models.huggingface_config import read_object
from titan_sparse.models.huggingface_files import files_to_copy
from titan_sparse.models.lora import export_adapter, merged
from titan_sparse.training.checkpoint.reader import read_into, read_metadata
from titan_sparse.training.faults.process_groups import barrier
from titan_sparse.training.preflight import build_adapters, step_path

logger = logging.getLogger("titan_sparse")

_TOKENIZER = "tokenizer_config.json"


def export_run(config: Config, step: int) -> None:
    """Write the checkpoint of `step` to <output_dir>/huggingface/step-N, unless it is there.
    Collective: the other ranks wait for rank 0."""
    output_dir = config.training.output_dir
    folder = os.path.join(output_dir, "huggingface", f"step-{step}")
    if dist.get_rank() == 0 and not os.path.exists(folder):
        export(step_path(config, step), config, folder)
        logger.info("saved %s for transformers", folder)
    barrier()


def export(
    checkpoint: str, config: Config, out: str, dtype: torch.dtype | None = None, merge: bool = False
) -> None:
    """Write the weights of a checkpoint, or its adapters for PEFT, to the new folder `out`. One
    process reads what all have saved.

    config: the run's. dtype: None for that of training, and for adapters float32. merge:
    adapters go into the weights of model.initial_hf. Raises ValueError, one line, for what
    cannot be exported.
    """
    model = config.model
    shape = resolve(**vars(model))
    metadata = read_metadata(checkpoint)
    if shape.tied_embeddings and "lm_head.weight" in metadata.state_dict_metadata:
        # Its weights, which showed that the head is not tied, have gone since.
        raise ValueError(
            f"{checkpoint} has lm_head.weight, but {model.initial_hf}/config.json says "
            "tie_word_embeddings = true; write false there"
        )
    # The model can read what it was trained on.
    length = config.training.seq_len
    shape = dataclasses.replace(shape, max_positions=max(shape.max_positions, length))
    tokenizer = open_tokenizer(config)
    files = exported_files(config.data, model.initial_hf, tokenizer)
    ends = text_ends(config, tokenizer)
    # As transformers writes it: a list only if there are several.
    stop = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    path = files_to_copy(model.initial_hf).get("generation_config.json")
    generation = read_object(path, model.initial_hf) if path else {}
    generation |= stop
    if tokenizer.padding != tokenizer.end_of_document:
        generation.setdefault("pad_token_id", tokenizer.padding)
    files["generation_config.json"] = json_bytes(generation)
    _raise_lengths(files, shape, model.initial_hf, length)
    read = functools.partial(read_into, checkpoint=checkpoint, alone=True, metadata=metadata)
    trained = getattr(torch, config.training.dtype)
    adapters = build_adapters(config, shape, tokenizer)
    if adapters and not merge:
        files |= _base_files(model, shape, out)
        dtype = dtype or torch.promote_types(trained, torch.float32)
        export_adapter(checkpoint, read, out, shape, adapters, dtype, model.initial_hf, files)
        return
    if adapters:
        saved = metadata.state_dict_metadata
        read = merged(read, saved, shape, adapters, model.initial_hf)
    dtype = dtype or trained
    export_weights(checkpoint, read, out, shape, dtype, model.initial_hf, files=files, entries=stop)
    _check_tokenizer(out, tokenizer)


def _raise_lengths(files: dict[str, bytes], shape: DecoderConfig, source: str, length: int) -> None:
    """Let the tokenizer of an export accept `length` tokens too, in place. Warn if its config.json
    cannot."""
    positions = exported_config(shape, "float32", source)["max_position_embeddings"]
    if positions < length:
        logger.warning(
            "training.seq_len = %d is above model.rope_factor * the original length = %d, which is "
            "the most that the exported config.json can say",
            length,
            positions,
        )
    if _TOKENIZER not in files:
        return
    values = json.loads(files[_TOKENIZER].decode("utf-8-sig"))
    if (values.get("model_max_length") or length) < length:
        values["model_max_length"] = length
        files[_TOKENIZER] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _base_files(model: Model, shape: DecoderConfig, out: str) -> dict[str, bytes]:
    """The config.json that the base of exported adapters needs, if it is not the base's own."""
    published = resolve(
        model.flavour, initial_hf=model.initial_hf, implementation=model.implementation
    )
    own = exported_config(published, "float32", model.initial_hf)
    needed = exported_config(shape, "float32", model.initial_hf)
    needs = []
    if shape.vocab_size > published.vocab_size:
        needs.append(f"model.resize_token_embeddings({shape.vocab_size})")
    # transformers reads the weights before it adds rows.
    needed["vocab_size"] = published.vocab_size
    files = {}
    if needed != own:
        needs.insert(0, f'from_pretrained(..., config=AutoConfig.from_pretrained("{out}"))')
        # The weights are those of the base.
        needed.pop("dtype", None)
        needed.pop("torch_dtype", None)
        files["config.json"] = json_bytes(needed)
    if needs:
        logger.warning(
            "before %s takes these adapters, it needs %s; titan-sparse export_hf --merge writes a "
            "whole model",
            model.initial_hf,
            " and ".join(needs),
        )
    return files


def _check_tokenizer(out: str, tokenizer: Tokenizer) -> None:
    """Warn if transformers reads other tokens from the folder `out`: for some values of model_type
    it takes the class of that family, whatever the tokenizer's files say."""
    if tokenizer.folder is None or FileTokenizer(out, False).extends(tokenizer):
        return
    logger.warning(
        "AutoTokenizer reads other tokens from %s than the run had, because model_type in its "
        "config.json chooses the class; read its tokenizer from a folder of its own",
        out,
    )
