"""Weights in safetensors, as Hugging Face keeps them: into a decoder, sharded or not, and out of a run's checkpoint."""

import json
import os
import re
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.models.huggingface_config import config_json
from titan_sparse.models.initialization import canonical_name

MAX_FILE_BYTES = 5 * 10**9
"""Above this the weights are split over several files, as transformers does."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")


def huggingface_name(name: str) -> str:
    """The name that transformers gives to a parameter of the decoder."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def tensor_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Shape of every tensor of a checkpoint, by the decoder's names; tied embeddings have no lm_head."""
    with torch.device("meta"):
        return {name: x.shape for name, x in Decoder(config, attend=None).state_dict().items()}


def check_weights(folder: str, config: DecoderConfig) -> None:
    """Reads headers only. Raises ValueError, one line that names a missing, unexpected or misshapen tensor or file."""
    expected = {huggingface_name(name): shape for name, shape in tensor_shapes(config).items()}
    with ExitStack() as stack:
        found = _open_tensors(folder, stack)
        missing, unexpected = (
            expected.keys() - found.keys(),
            {name for name in found if not _is_spare(name, config)},
        )
        for what, names in (
            ("has no tensor", missing),
            ("has an unexpected tensor", unexpected - expected.keys()),
        ):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise ValueError(f"model.initial_hf: {folder} {what} {min(names)}{more}")
        for name, shape in expected.items():
            header = found[name].get_slice(name)
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


@torch.no_grad()
def load_weights(model: nn.Module, folder: str, config: DecoderConfig) -> None:
    """Fill every parameter of a materialised Decoder, plain or DTensor, in place and in the parameter's dtype.

    A rank reads its own shard of each tensor and nothing else; nothing is sent. Raises what check_weights() raises.
    """
    check_weights(folder, config)
    with ExitStack() as stack:
        found = _open_tensors(folder, stack)
        for name, parameter in model.named_parameters():
            name = huggingface_name(canonical_name(name))
            local, where = parameter, (slice(None),) * parameter.ndim
            if isinstance(parameter, DTensor):
                local, where = parameter.to_local(), _shard(parameter)
            if local.numel():  # more ranks than rows: some have nothing
                local.copy_(found[name].get_slice(name)[where])


def export_weights(
    checkpoint: str,
    folder: str,
    config: DecoderConfig,
    dtype: torch.dtype,
    source: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model of a checkpoint of this project to a new `folder` that transformers loads, in `dtype`.

    checkpoint: a folder step-N, only read; one process suffices, whatever wrote it, and it holds one file's weights at a
    time. source: a folder of Hugging Face whose tokenizer goes along; empty: none. Raises ValueError of one line if
    `folder` is already there, or lies among the run's checkpoints, where old ones are deleted.
    """
    folder, part = Path(folder), Path(f"{folder}.incomplete")
    if folder.exists():
        raise ValueError(f"{folder} is already there; write the name of a new folder")
    among = Path(checkpoint).resolve().parent
    # torchtitan's manager takes every such name beside a checkpoint for another one.
    if folder.resolve().is_relative_to(among) and re.search(
        r"step-\d", folder.resolve().relative_to(among).parts[0]
    ):
        raise ValueError(
            f"{folder} lies among the run's checkpoints, where old ones are deleted; write another folder"
        )
    values = config_json(config, str(dtype).removeprefix("torch."), source)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _write_tensors(checkpoint, part, tensor_shapes(config), dtype, max_file_bytes)
    (part / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES if source else ():
        if (Path(source).expanduser() / name).is_file():
            shutil.copy(Path(source).expanduser() / name, part / name)
    os.rename(part, folder)  # last: a folder of this name is complete


def _write_tensors(
    checkpoint: str, folder: Path, shapes: dict[str, torch.Size], dtype: torch.dtype, max_bytes: int
) -> None:
    groups, weight_map, total = _groups(shapes, dtype.itemsize, max_bytes), {}, 0
    for number, names in enumerate(groups, 1):
        file = _SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        state = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
        with warnings.catch_warnings():  # one process is what no_dist asks for
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)  # casts while it copies
        state = {huggingface_name(name): x for name, x in state.items()}
        save_file(
            state, folder / file, metadata={"format": "pt"}
        )  # transformers asks for the format
        weight_map |= dict.fromkeys(state, file)
        total += sum(x.nbytes for x in state.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _groups(shapes: dict[str, torch.Size], itemsize: int, max_bytes: int) -> list[list[str]]:
    """Names in order, cut so that a group has at most max_bytes, or a single tensor."""
    groups, size = [[]], 0
    for name, shape in shapes.items():
        bytes_of_tensor = shape.numel() * itemsize
        if groups[-1] and size + bytes_of_tensor > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_of_tensor
    return groups


def _open_tensors(folder: str, stack: ExitStack) -> dict[str, safe_open]:
    """The open file that holds each tensor; files stay open until `stack` is left."""
    found: dict[str, safe_open] = {}
    for path in _files(Path(folder).expanduser()):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model.initial_hf: {path} cannot be read: {error}") from error
        found |= dict.fromkeys(file.keys(), file)
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            return sorted({folder / name for name in index["weight_map"].values()})
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"model.initial_hf: {folder / _INDEX} has no readable weight_map: {error}"
            ) from error
    if not (folder / _SINGLE).is_file():
        raise ValueError(
            f"model.initial_hf: {folder} has neither {_SINGLE} nor {_INDEX}; "
            "save it with save_pretrained()"
        )
    return [folder / _SINGLE]


def _is_spare(name: str, config: DecoderConfig) -> bool:
    """Tensors that transformers passes over as well: the copy of a tied head, the tables of early Llama checkpoints."""
    return name.endswith(".rotary_emb.inv_freq") or (
        config.tied_embeddings and name == "lm_head.weight"
    )


def _shard(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the full tensor this rank holds."""
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
