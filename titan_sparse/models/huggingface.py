"""Weights in safetensors, in the format of Hugging Face.

load_weights() reads them into a decoder, sharded or not. export_weights() writes them from a
checkpoint of a run. In most models a parameter is one tensor of the files. Mixtral and Qwen3-MoE
store each matrix of each expert as its own tensor, but in memory transformers holds all experts of
a layer together: gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import DecoderConfig, is_adapter
from titan_sparse.models.huggingface_config import config_json, read_json
from titan_sparse.models.huggingface_files import INDEX_FILE, open_tensors, write_files
from titan_sparse.models.initialization import canonical_name
from titan_sparse.models.transformers_config import TransformersConfig

logger = logging.getLogger("titan_sparse")

_DTYPES = ("F64", "F32", "F16", "BF16")
_EMBEDDING = "model.embed_tokens.weight"


def tensor_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Shape of every tensor of a checkpoint, by the decoder's names; tied embeddings have no
    lm_head."""
    with torch.device("meta"):
        # Shapes without memory.
        model = build_decoder(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_weights(folder: str, config: DecoderConfig) -> None:
    """Check the names, shapes and dtypes of the weights in a folder; reads headers only, unless
    there is a head beside tied embeddings.

    Raises ValueError, one line that names a missing, unexpected or misshapen tensor or file.
    """
    shapes = {
        stored.name: stored.shape
        for name, shape in tensor_shapes(config).items()
        for stored in stored_tensors(name, shape, config)
    }
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        # transformers also ignores the copy of a tied head, and early Llamas' rotary tables.
        ignored = ("lm_head.weight",) if config.tied_embeddings else ()
        found = {name for name in tensors if not name.endswith(".rotary_emb.inv_freq")}
        if getattr(config, "linear_layers", ()):
            found -= _left_out(found)
        _refuse_names("has no tensor", shapes.keys() - tensors.keys(), folder)
        _refuse_names("has an unexpected tensor", found - shapes.keys() - set(ignored), folder)
        for name, shape in shapes.items():
            header = tensors[name]()
            if tuple(header.get_shape()) != tuple(shape):
                raise ValueError(
                    f"model.initial_hf: {name} in {folder} is {list(header.get_shape())}, "
                    f"but its config.json says {list(shape)}"
                )
            if header.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"model.initial_hf: {name} in {folder} is {header.get_dtype()}; "
                    f"only {', '.join(_DTYPES)} can be read"
                )
        # transformers keeps a head that differs, whatever the file says.
        if config.tied_embeddings and "lm_head.weight" in tensors:
            head, embedding = (tensors[name]()[:] for name in ("lm_head.weight", _EMBEDDING))
            if head.dtype != embedding.dtype or not torch.equal(head, embedding):
                raise ValueError(
                    f"model.initial_hf: lm_head.weight in {folder} is not {_EMBEDDING}, but its "
                    "config.json has tie_word_embeddings = true; write false"
                )


def _left_out(names: Iterable[str]) -> set[str]:
    """What hybrid models have beside text: heads that predict several tokens, and vision towers."""
    return {name for name in names if name.startswith(("mtp.", "model.visual."))}


def _refuse_names(problem: str, names: set[str], folder: str) -> None:
    if not names:
        return
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise ValueError(f"model.initial_hf: {folder} {problem} {min(names)}{more}")


@torch.no_grad()
def load_weights(model: nn.Module, folder: str, config: DecoderConfig) -> None:
    """Fill every parameter of a materialized Decoder except adapters in place, in the parameter's
    dtype. Parameters are plain or DTensor.

    Each rank reads only its own shard of each tensor, without communication. Raises what
    check_weights() raises.
    """
    check_weights(folder, config)
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        left_out = _left_out(tensors)
        if left_out:
            logger.info(
                "%s holds %d tensors of an MTP head or a vision tower; they are left out",
                folder,
                len(left_out),
            )
        for parameter_name, parameter in model.named_parameters():
            if is_adapter(parameter_name):
                continue
            local = parameter
            begin = 0
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                # FSDP shards the first dim.
                _, (begin, *_) = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            end = begin + len(local)
            for stored in stored_tensors(canonical_name(parameter_name), parameter.shape, config):
                tensor = tensors[stored.name]()
                # With more ranks than rows, some ranks have nothing to read.
                if not stored.index and begin < end:
                    local.copy_(tensor[begin:end])
                elif stored.index and begin <= stored.index[0] < end:
                    expert, rows = stored.index
                    local[expert - begin, rows].copy_(tensor[:])


def export_weights(
    checkpoint: str,
    read: Callable[[dict[str, Tensor]], None],
    folder: str,
    config: DecoderConfig,
    dtype: torch.dtype,
    source: str = "",
    max_file_bytes: int = 5 * 10**9,
    files: dict[str, bytes] | None = None,
    entries: dict[str, Any] | None = None,
) -> None:
    """Write the model of a checkpoint of this project to a new `folder`, in `dtype`, so that
    transformers loads it.

    checkpoint: a folder step-N, which is only read. One process is enough, however many wrote it.
    It holds one file's weights at a time.
    read: fills tensors of these names from the checkpoint, whatever their dtype.
    source: the Hugging Face folder that training began from, whose config.json gives all other
    entries; empty: none.
    max_file_bytes: larger weights are split over several files, as in transformers. files: name ->
    content of the tokenizer and other files to write next to the weights. entries: of config.json, in
    place of those of `source`.
    Raises ValueError of one line if `folder` already exists, or lies among the run's checkpoints,
    where old ones are deleted.
    """
    values = _config_to_write(config, str(dtype).removeprefix("torch."), source) | (entries or {})
    with new_folder(folder, checkpoint) as incomplete:
        shapes = tensor_shapes(config)
        with torch.device("meta"):
            empty = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        split = split_torch_state_dict_into_shards(empty, max_shard_size=max_file_bytes)
        file_of_tensor: dict[str, str] = {}
        for file, names in split.filename_to_tensors.items():
            state = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
            read(state)
            tensors: dict[str, Tensor] = {}
            for name, tensor in state.items():
                for stored in stored_tensors(name, tensor.shape, config):
                    part = tensor[stored.index]
                    # Copy a part of a tensor, because two entries of a file may not share memory.
                    tensors[stored.name] = part if part.shape == tensor.shape else part.clone()
            # transformers requires the format.
            save_file(tensors, incomplete / file, metadata={"format": "pt"})
            file_of_tensor |= dict.fromkeys(tensors, file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": file_of_tensor}
            index_text = json.dumps(index, indent=2) + "\n"
            (incomplete / INDEX_FILE).write_text(index_text, encoding="utf-8")
        config_text = json.dumps(values, indent=2) + "\n"
        (incomplete / "config.json").write_text(config_text, encoding="utf-8")
        write_files(files or {}, incomplete)


@contextmanager
def new_folder(folder: str, checkpoint: str) -> Iterator[Path]:
    """A folder to write to, which is renamed to `folder` when everything is written.

    Raises ValueError of one line if `folder` already exists, or lies among the run's checkpoints
    (next to `checkpoint`), where old ones are deleted.
    """
    path = Path(folder)
    incomplete = Path(f"{folder}.incomplete")
    if path.exists():
        raise ValueError(f"{folder} is already there; write the name of a new folder")
    checkpoints = Path(checkpoint).resolve().parent
    resolved = path.resolve()
    inside = resolved.is_relative_to(checkpoints) and resolved.relative_to(checkpoints).parts[0]
    if inside and re.search(r"step-\d", inside):
        raise ValueError(
            f"{folder} lies among the run's checkpoints, where old ones are deleted; "
            "write another folder"
        )
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    yield incomplete
    # Last, so that a folder of this name is always complete.
    os.rename(incomplete, path)


def _config_to_write(config: DecoderConfig, dtype: str, source: str) -> dict[str, Any]:
    """The content of config.json. For transformers' own models, it is that of config.folder, which
    the model was built from, with another dtype and as many layers as the model has."""
    if not isinstance(config, TransformersConfig):
        return config_json(config, dtype, source)
    values = read_json(config.folder)
    # transformers 4 and 5 have different names for this. The newer one wins.
    values.pop("torch_dtype", None)
    # model.layers may have left out some layers.
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: config.layers]
    return values | {
        "dtype": dtype,
        "num_hidden_layers": config.layers,
        "tie_word_embeddings": config.tied_embeddings,
    }


class Stored(NamedTuple):
    """A tensor of the folder, and which part of a parameter it is."""

    name: str
    shape: torch.Size
    index: tuple[int, slice] | tuple[()] = ()
    """expert and rows of the parameter; empty for all of it"""


_QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")
_SPLIT = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), _QWEN),
}
"""Names on disk of a layer's mixture of experts and of its gate, up and down, by model_type of the
families that store experts separately. GPT-OSS stores tensors as they are in memory."""


def huggingface_name(name: str) -> str:
    """The name that transformers gives to a parameter of the decoder, in memory."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def stored_tensors(name: str, shape: torch.Size, config: DecoderConfig) -> list[Stored]:
    """The tensors of a folder that make up the parameter `name` of the decoder."""
    whole = Stored(huggingface_name(name), shape)
    names = _SPLIT.get(config.model_type) if isinstance(config, TransformersConfig) else None
    if names is None or ".mlp." not in name:
        return [whole]
    block, gate, up, down = names
    layer, _, rest = huggingface_name(name).partition(".mlp.")
    if rest == "experts.gate_up_proj":
        matrices = [gate, up]
    elif rest == "experts.down_proj":
        matrices = [down]
    else:
        # The router, or the MLP of a layer without experts.
        return [whole._replace(name=f"{layer}.{block}.{rest}")]
    experts, rows, columns = shape
    rows //= len(matrices)
    return [
        Stored(
            f"{layer}.{block}.experts.{expert}.{matrix}.weight",
            torch.Size([rows, columns]),
            (expert, slice(number * rows, (number + 1) * rows)),
        )
        for expert in range(experts)
        for number, matrix in enumerate(matrices)
    ]
