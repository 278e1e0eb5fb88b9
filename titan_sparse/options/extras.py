"""The packages that an extra of titan-sparse installs. The library itself needs none of them."""

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable

EXTRAS = {
    "train": (
        "torchao",
        "datasets",
        "tokenizers",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "tensorboard",
        "tomli",
        "tqdm",
        "matplotlib",
    ),
    "eval": ("lm_eval",),
}
"""extra -> its packages, by the names with which they are imported"""


class MissingExtra(ImportError):
    """Packages of an extra are not installed. Its message is one line that says what to write."""


def is_installed(package: str) -> bool:
    """True if a package can be found by its name. Nothing is imported, so an installed package that
    is broken counts, and reports its own error."""
    try:
        found = importlib.util.find_spec(package)
    except ImportError:
        return False
    except ValueError:
        # It is loaded, by something that gave it no spec.
        return True
    # A folder of that name, where this process was started, looks like a package without code.
    return found is not None and found.origin is not None


@functools.cache
def need(extra: str) -> None:
    """Raise MissingExtra unless all packages of an extra are installed."""
    missing = [package for package in EXTRAS[extra] if not is_installed(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtra(
            f'{", ".join(missing)} {verb} not installed; write pip install "titan-sparse[{extra}]"'
        )


def need_here(extra: str) -> None:
    """need(), for the __init__.py of a package. `python -m` of a module in it ends in one line."""
    try:
        need(extra)
    except MissingExtra as error:
        # Python writes this word while it looks for the module that -m names.
        if sys.argv[:1] == ["-m"]:
            sys.exit(report(error))
        raise


def program(main: Callable[..., int]) -> Callable[..., int]:
    """The main() of a program of the trainer: without the extra it prints
    one line and returns 2."""

    @functools.wraps(main)
    def run(*arguments) -> int:
        try:
            need("train")
        except MissingExtra as error:
            return report(error)
        return main(*arguments)

    return run


def report(error: MissingExtra) -> int:
    """Print the error, once on a node. Returns the exit status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        # torchrun ends the other ranks as soon as one is gone.
        time.sleep(2)
    return 2
