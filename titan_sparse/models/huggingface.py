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
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import DecoderConfig, is_adapter
from titan_sparse.models.huggingface_config import config_json, read_json, set_positions, set_theta
from titan_sparse.models.huggingface_files import INDEX_FILE, open_tensors, write_files
from titan_sparse.models.initialization import canonical_name, trained_tokens, whole_name
from titan_sparse.options.values import full_disk_at, one_line

logger = logging.getLogger("titan_sparse")

_DTYPES = ("F64", "F32", "F16", "BF16")
_EMBEDDING = "model.embed_tokens.weight"
_ROWS = 4096
"""Rows that are averaged at once, to hold few of them in float64."""
_SAMPLE = 256
"""Rows from which the usual length of a row is estimated, and unused rows that are looked at."""
_ALIKE = 0.01
"""Two rows are alike if their distance is below this share of the usual length of a row."""
_BY_TOKEN = {_EMBEDDING, "lm_head.weight"}
"""Tensors with a row for each token."""


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
    # model.vocab_size may add rows, which load_weights() fills.
    for name in _BY_TOKEN & shapes.keys():
        shapes[name] = torch.Size([read_json(folder)["vocab_size"], config.hidden_size])
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        # transformers also ignores the copy of a tied head, and early Llamas' rotary tables.
        ignored = ("lm_head.weight",) if config.tied_embeddings else ()
        found = {name for name in tensors if not name.endswith(".rotary_emb.inv_freq")}
        if config.linear_layers:
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
    """The modules of hybrid models beside text: heads that predict several tokens, and vision
    towers."""
    return {name for name in names if name.startswith(("mtp.", "model.visual."))}


def _refuse_names(problem: str, names: set[str], folder: str) -> None:
    if not names:
        return
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise ValueError(f"model.initial_hf: {folder} {problem} {min(names)}{more}")


@torch.no_grad()
def load_weights(model: nn.Module, folder: str, config: DecoderConfig) -> None:
    """Fill every parameter of a materialized Decoder except A and B of adapters in place, in the
    parameter's dtype. Parameters are plain or DTensor.

    Tokens that the folder does not have begin as the mean of its rows. Each rank reads only its own
    shard of each tensor, without communication. Raises what check_weights() raises.
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
            trained = trained_tokens(model, parameter_name)
            if is_adapter(parameter_name) and not trained:
                continue
            local, begin = parameter, 0
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                # FSDP shards the first dim.
                _, (begin, *_) = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            end = begin + len(local)
            name = canonical_name(parameter_name)
            if trained:
                tensor = tensors[huggingface_name(whole_name(name))]()
                _copy_tokens(tensor, trained[begin:end], local)
                continue
            for stored in stored_tensors(name, parameter.shape, config):
                tensor = tensors[stored.name]()
                if not stored.index:
                    copy_rows(tensor, begin, local)
                elif begin <= stored.index[0] < end:
                    expert, rows = stored.index
                    local[expert - begin, rows].copy_(tensor[:])


def untrained_tokens(
    folder: str, tokens: Iterable[int], added: Iterable[int], first_unused: int
) -> list[int]:
    """The `tokens` whose row in the embedding or in the head of a folder is zero, or equals that of
    another added token or of a row that no token uses. Sorted.

    added: all tokens beside those of text. first_unused: the number of tokens of the tokenizer.
    """
    known = read_json(folder)["vocab_size"]
    compared = {token for token in (*tokens, *added) if token < known}
    # Tables are padded with rows that begin as the added ones did.
    compared = sorted(compared.union(range(first_unused, known)[:_SAMPLE]))
    found = set()
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        for name in _BY_TOKEN & tensors.keys():
            tensor = tensors[name]()
            sample = _read_rows(tensor, range(0, known, -(-known // _SAMPLE)))
            rows = _read_rows(tensor, compared)
            distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
            # The distance to itself becomes that to zero.
            distances.diagonal().copy_(rows.norm(dim=1))
            is_untrained = distances.amin(1) < _ALIKE * sample.norm(dim=1).median()
            found |= {compared[place] for place in is_untrained.nonzero().flatten().tolist()}
    return sorted(found.intersection(tokens))


def _read_rows(tensor: Any, rows: Iterable[int]) -> Tensor:
    """Rows of a slice of safetensors, float32 [rows, columns]."""
    return torch.cat([tensor[row : row + 1] for row in rows]).float()


def copy_rows(tensor: Any, begin: int, rows: Tensor) -> None:
    """Fill `rows` with those of a tensor on disk from row `begin` on. Rows that it does not have
    become their mean, as in transformers' resize_token_embeddings() but without its noise.

    tensor: a slice of safetensors. rows: may have no row, on a rank without any.
    """
    there = min(max(tensor.get_shape()[0] - begin, 0), len(rows))
    if there:
        rows[:there].copy_(tensor[begin : begin + there])
    if there < len(rows):
        rows[there:].copy_(_mean_row(tensor))


def _copy_tokens(tensor: Any, tokens: list[int], rows: Tensor) -> None:
    """Fill rows [tokens, hidden] with those of these tokens, as copy_rows() does."""
    known = tensor.get_shape()[0]
    is_new = torch.tensor([token >= known for token in tokens], dtype=torch.bool)
    for token, row in zip(tokens, rows, strict=True):
        if token < known:
            row.copy_(tensor[token : token + 1][0])
    if is_new.any():
        rows[is_new.to(rows.device)] = _mean_row(tensor).to(rows)


def _mean_row(tensor: Any) -> Tensor:
    """The mean of the rows of a slice of safetensors, float64 [columns]. It is the same on each
    rank."""
    count = tensor.get_shape()[0]
    sums = [tensor[begin : begin + _ROWS].double().sum(0) for begin in range(0, count, _ROWS)]
    return torch.stack(sums).sum(0) / count


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
    content of the tokenizer and other files to write next to the weights. entries: of config.json,
    in place of those of `source`.
    Raises ValueError of one line if `folder` already exists, or lies among the run's checkpoints,
    where old ones are deleted.
    """
    values = exported_config(config, str(dtype).removeprefix("torch."), source) | (entries or {})
    written = {"config.json": json_bytes(values), **(files or {})}
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
            save_tensors(tensors, incomplete / file)
            file_of_tensor |= dict.fromkeys(tensors, file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": file_of_tensor}
            written[INDEX_FILE] = json_bytes(index)
        write_files(written, incomplete)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that transformers and PEFT read. Raises OSError, one line, where that is
    impossible."""
    try:
        # transformers requires the format.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {one_line(error)}") from error


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


@contextmanager
def new_folder(folder: str, checkpoint: str) -> Iterator[Path]:
    """A folder to write to, which is renamed to `folder` when everything is written.

    Raises ValueError of one line if `folder` already exists, or lies among the run's checkpoints
    (next to `checkpoint`), where old ones are deleted.
    """
    path = Path(folder)
    if path.exists():
        raise ValueError(f"{folder} is already there; write the name of a new folder")
    # The name may end with a slash.
    incomplete = path.with_name(f"{path.name}.incomplete")
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
    with full_disk_at(folder):
        yield incomplete
    # Last, so that a folder of this name is always complete.
    os.rename(incomplete, path)


def exported_config(config: DecoderConfig, dtype: str, source: str) -> dict[str, Any]:
    """The content of config.json for weights of `dtype` (such as "bfloat16").

    For transformers' own models, it is that of config.folder, which the model was built from, with
    what the run has changed. source: as in export_weights().
    """
    if not config.runs_in_transformers:
        return config_json(config, dtype, source)
    values = read_json(config.folder)
    # transformers 4 and 5 have different names for this. The newer one wins.
    values.pop("torch_dtype", None)
    # model.layers may have left out some layers.
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: config.layers]
    set_positions(values, config.max_positions)
    if config.has_one_theta:
        set_theta(values, config.rope.theta)
    return values | {
        "dtype": dtype,
        "num_hidden_layers": config.layers,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
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
    names = _SPLIT.get(config.model_type)
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
