"""Models and tokenizers by their name on the Hugging Face hub, downloaded into its usual cache."""

import os
import re
from pathlib import Path

from titan_sparse.models.huggingface_files import TOKENIZERS, weight_files
from titan_sparse.options.values import show

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]
_COPIES = ["original/*", "consolidated*"]
"""The same weights in another format, which some models have too."""


def local_folder(name: str, key: str, weights: bool) -> str:
    """The folder of a model that is named as on the hub, such as "Qwen/Qwen2.5-0.5B"; any other name,
    and that of a folder or file that exists here, is returned as it is.

    What the cache holds is used without asking the hub, so that a run that goes on has the same
    weights. Files that are missing are downloaded. The processes of a node wait for the one that
    downloads, and the first one shows the progress.
    key: of the name. weights: whether they are needed, in addition to a tokenizer. Raises ValueError,
    one line, if the model cannot be downloaded.
    """
    if not _NAME.fullmatch(name) or os.path.exists(name):
        return name
    # Only here: it takes a while to load.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = _TEXT_FILES + _WEIGHTS * weights
    try:
        folder = snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        if _is_whole(Path(folder), weights):
            return folder
    except OSError:
        # Nothing of it is in the cache.
        pass
    if os.environ.get("LOCAL_RANK", "0") != "0":
        disable_progress_bars()
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=_COPIES)
    # Whatever a network, a hub, or a full disk raises.
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
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
