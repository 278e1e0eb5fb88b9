"""The attention of a probe, some of a span's queries, on every block of keys: two passes over the
keys.

held_rows(q, local, mine) -> the probe's rows
block_lse(probe, keys) -> lse of each block
span_lse(block_lse, slot, run) -> lse of each span
block_masses(probe, keys, lse) -> masses by vertical, masses by tile

The normalizer of a row is known only after all of the keys, so that the softmax sums come first,
and the masses by vertical and by tile in a second pass. The twins in probe.naive have the same
names and signatures.
"""

from titan_sparse.kernels.probe import naive
from titan_sparse.kernels.probe.kernel import (
    KeyBlocks,
    Probe,
    block_lse,
    block_masses,
    held_rows,
    span_lse,
)
