"""Block-sparse attention over lists of blocks, for one piece of keys or two fused: kernels and a plain-torch twin.

forward(q, pieces, start, stop, block_size, scale) -> out, lse
backward(d_out, q, out, lse, pieces, start, stop, block_size, scale) -> dq, [(dk, dv) of each piece]
"""

from . import naive
from .backward import backward
from .forward import forward
from .piece import INTERPRETED, Lists, Piece

__all__ = ["INTERPRETED", "Lists", "Piece", "backward", "forward", "naive"]
