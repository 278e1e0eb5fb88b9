"""Which kernel computes a piece of attention. A backend is a module with forward() and backward() over Tiles.

forward(q, k, v, tiles, scale) -> out, lse            one piece: a KV chunk's blocks, or the gathered columns
backward(d_out, q, k, v, out, lse, tiles, scale) -> dq, dk, dv         with the global out and lse
"""

from types import ModuleType

from titan_sparse.attention.backends import eager

BACKENDS: dict[str, ModuleType] = {"eager": eager}


def choose(name: str) -> tuple[str, str]:
    """The backend that `name` ("auto" or a backend) means, and in words why; ValueError for an unknown name."""
    if name == "auto":
        return "eager", "the only backend so far; gathers the selected KV blocks in plain PyTorch"
    if name not in BACKENDS:
        raise ValueError(f'attention.backend = "{name}" is unknown; write "auto" or one of {", ".join(BACKENDS)}')
    return name, "asked for"
