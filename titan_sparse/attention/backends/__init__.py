"""The table of backends, the choice among them, and the reason for the choice.

What a backend offers is in base.py.
"""

import torch

from titan_sparse.attention.backends.base import Backend, Case
from titan_sparse.attention.backends.cudnn import Cudnn
from titan_sparse.attention.backends.eager import Eager
from titan_sparse.attention.backends.flex import Flex
from titan_sparse.attention.backends.triton import Triton

BACKENDS: dict[str, Backend] = {
    "cudnn": Cudnn(),
    "eager": Eager(),
    "flex": Flex(),
    "triton": Triton(),
}


def short_below(recall: float, head_dim: int) -> int:
    """Tokens of a sequence below which triton beats flex, at the density that this recall takes.

    Fitted to benchmarks/results/backends_h200.json and choose_h200.json: from 4,096 to 262,144
    tokens and recall 0.9 to 0.99, the choice is within 2 % of the better of the two.
    """
    return int(870_000 / head_dim * ((1 - recall) / 0.05) ** 1.4)


@torch.compiler.assume_constant_result
def choose(name: str, *case, here: bool = True, **options) -> str:
    """The name of the backend for the inputs of a Case, whose fields follow. "auto" means the
    fastest one that serves them: on this machine, or with here=False on a Hopper GPU with
    everything installed.

    Raises ValueError for an unknown name, and if the named backend cannot serve the inputs; the
    message says why.
    """
    case = Case(*case, **options)
    if name == "auto":
        # The eager backend serves everything, so the search always ends.
        return next(each for each in _by_speed(case) if _refusal(each, case, here) is None)
    if name not in BACKENDS:
        raise ValueError(
            f'attention.backend = "{name}" is unknown; write "auto" or one of {", ".join(BACKENDS)}'
        )
    reason = _refusal(name, case, here)
    if reason is not None:
        raise ValueError(reason)
    return name


def explain(name: str, *case, **options) -> str:
    """The backend that choose() returns, with the reason, for the banner. Arguments and errors as
    in choose()."""
    chosen = choose(name, *case, **options)
    description = BACKENDS[chosen].describe()
    if name != "auto":
        return f"{description}; asked for"

    case = Case(*case, **options)
    for faster in _by_speed(case):
        if faster == chosen:
            break
        description += f"; not {faster}, since {_refusal(faster, case)}"
    return description


def _by_speed(case: Case) -> tuple[str, ...]:
    """Names of backends, fastest first, as measured on an H200 (docs/benchmarks.md)."""
    if case.device_type != "cuda":
        # On the CPU the kernels run in an interpreter, which is for tests only.
        return ("eager",)
    if case.slices:
        return ("triton", "eager")
    if not case.dynamic:
        return ("flex", "cudnn", "triton", "eager")
    # flex reads the queries twice, once for blocks and once for verticals.
    return ("triton", "flex", "eager") if case.is_short else ("flex", "triton", "eager")


def _refusal(name: str, case: Case, here: bool = True) -> str | None:
    backend = BACKENDS[name]
    if case.slices and not backend.SERVES_SLICES:
        serving = [other for other in BACKENDS if BACKENDS[other].SERVES_SLICES]
        return (
            f'attention.backend = "{name}" does not compute masks of Slices; '
            f'write "auto" or one of {", ".join(serving)}'
        )
    if case.dynamic and name == "cudnn":
        return (
            'attention.backend = "cudnn" computes dense attention, and this pattern is sparse; '
            'write "auto" or "triton"'
        )
    reason = backend.refusal(case)
    if reason is None and here and case.device_type == "cuda":
        missing = backend.missing(case)
        if missing is not None:
            return f'attention.backend = "{name}" cannot run: {missing}; write "triton"'
    return reason
