"""The files of a Hugging Face folder: which weights count, what an export copies, and the folder of
a name on the hub, downloaded into its usual cache."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from titan_sparse.options.values import one_line, show

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
"""Files that transformers can read a tokenizer from."""
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of the other templates, such as tool_use.jinja."""
_COPIED_FILES = (
    "generation_config.json",
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEADER_BYTES = 2**20
"""Large enough for the names in most safetensors files."""
_SAMPLES = 64
_SAMPLE_BYTES = 2**16


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads: model.safetensors, else what the index names.

    Raises ValueError, one line, if there is neither, or the index is broken or leaves its folder.
    """
    # Check this first, as transformers does: an index next to it is left over.
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise ValueError(
            f"model.initial_hf: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "save it with save_pretrained()"
        )
    try:
        index = json.loads(index_path.read_text(encoding="utf-8-sig"))
        names = list(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"model.initial_hf: {index_path} has no readable weight_map: {error}"
        ) from error
    for name in names:
        # A download may come from anyone, so nothing outside its folder is opened.
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(
                f"model.initial_hf: {index_path} names the file {json.dumps(name)}; write "
                f"names of *.safetensors that lie in {folder} itself"
            )
    return sorted(folder / name for name in set(names))


def files_to_copy(source: str, key: str = "model.initial_hf") -> dict[str, Path]:
    """Name -> file of what an export copies from the folder `source`; empty for no folder.

    Raises ValueError of one line, naming `key`, for a link that leaves `source`. Links in Hugging
    Face's cache are allowed if they stay in the model's own folder there.
    """
    if not source:
        return {}
    root = Path(source).expanduser().resolve()
    # models--NAME/snapshots/COMMIT, whose files are links to models--NAME/blobs.
    inside = root.parent.parent if root.parent.name == "snapshots" else root
    files = {}
    templates = sorted(path.name for path in (root / MORE_TEMPLATES).glob("*.jinja"))
    for name in [*_COPIED_FILES, *(f"{MORE_TEMPLATES}/{template}" for template in templates)]:
        target = (root / name).resolve()
        if not target.is_file():
            continue
        # A download may come from anyone, and the export may be given to anyone.
        if not target.is_relative_to(inside):
            raise ValueError(
                f"{key}: {root / name} is a link to {target}, outside of its folder, and "
                "is not read or copied; write the file itself there, or remove the link"
            )
        files[name] = target
    return files


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write files, named by their paths within `folder`."""
    for name, content in files.items():
        # A name may begin with a folder.
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def weights_digest(folder: str) -> str:
    """A digest that identifies the weights of a folder: sha256 over names and sizes of their files,
    headers, and samples of 64 KiB. Reading everything would take minutes for a large model.

    Training changes nearly every number, so other weights of the same shape have another digest.
    Raises what weight_files() raises.
    """
    digest = hashlib.sha256()
    for path in weight_files(Path(folder).expanduser()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        # The header has names and shapes. Of the weights, samples are enough.
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for sample in range(_SAMPLES):
                file.seek(sample * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def open_tensors(folder: str, stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """By tensor, a function that opens it as a slice of safetensors. Files stay open
    until `stack` is left."""
    tensors: dict[str, Callable[[], Any]] = {}
    for path in weight_files(Path(folder).expanduser()):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model.initial_hf: {path} cannot be read: {error}") from error
        for stored in file.keys():
            # transformers writes the text part of a model with a vision tower under these names.
            name = re.sub(r"^model\.language_model\.", "model.", stored)
            tensors[name] = functools.partial(file.get_slice, stored)
    return tensors


def local_folder(name: str, key: str, weights: bool) -> str:
    """The folder of a model that is named as on the hub, such as "Qwen/Qwen2.5-0.5B"; any other
    name, and that of a folder or file that exists here, is returned as it is.

    What the cache holds is used without asking the hub, so that a run that goes on has the same
    weights. Files that are missing are downloaded. The processes of a node wait for the one that
    downloads, and the first one shows the progress.
    key: of the name. weights: whether they are needed, in addition to a tokenizer. Raises
    ValueError, one line, if the model cannot be downloaded.
    """
    if not _HUB_NAME.fullmatch(name) or os.path.exists(name):
        return name
    # Only here: it takes a while to load.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + ["*.safetensors"] * weights
    try:
        folder = snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        if _is_whole(Path(folder), weights):
            return folder
    except OSError:
        pass  # Nothing of it is in the cache.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        disable_progress_bars()
    try:
        # The same weights in another format, which some models have too.
        copies = ["original/*", "consolidated*"]
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=copies)
    # Whatever a network, a hub, or a full disk raises.
    except Exception as error:
        reason = one_line(error).partition(". ")[0]
        raise ValueError(
            f"{key} = {show(name)} is not a folder here, and downloading it from the Hugging Face hub "
            f"failed ({type(error).__name__}: {reason}); write the path of a folder, for example that "
            f"of `hf download {name} --local-dir FOLDER`"
        ) from error


def _is_whole(folder: Path, weights: bool) -> bool:
    """True if a snapshot holds what is needed. A download may have been interrupted."""
    if not weights:
        return any((folder / name).is_file() for name in TOKENIZERS)
    try:
        return all(path.is_file() for path in (folder / "config.json", *weight_files(folder)))
    except ValueError:
        return False
