"""Kernels of inductor that keep whole rows in registers where they would read
back their own stores.

The class stands in a module, because the keys of inductor's caches are pickled: with a class made
in a function nothing is cached. Importing it loads inductor, so compiling.py does that late.
"""

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import (
    DisableReduction,
    EnableReduction,
    SIMDKernelFeatures,
)
from torch._inductor.virtualized import V

_LARGEST_ROW = 16384
"""Elements of a row that a program can hold: more than any norm here has."""

_holds_rows_in_inductor = InductorChoices.should_use_persistent_reduction


class ChoicesWithoutRaces(InductorChoices):
    """Kernels that would read back their own stores keep whole rows in registers instead."""

    @staticmethod
    def should_use_persistent_reduction(
        features: SIMDKernelFeatures, cooperative_reduction: bool
    ) -> bool:
        """True if a kernel holds whole rows, as inductor asks it for each reduction."""
        fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LARGEST_ROW)
        if fits and reads_back(features):
            return True
        return _holds_rows_in_inductor(features, cooperative_reduction)

    def uuid(self) -> str:
        """Says in the keys of inductor's caches what kernels were made with."""
        return "titan_sparse: no kernel reads back what it stored, 1"


def reads_back(features: SIMDKernelFeatures) -> bool:
    """True if a kernel that went over its rows in loops would load what an earlier loop stored."""
    stored: set[str] = set()
    stored_in_this_loop: set[str] = set()
    in_loop = True
    for node in features.node_schedule:
        if node in (DisableReduction, EnableReduction):
            stored |= stored_in_this_loop
            stored_in_this_loop = set()
            in_loop = node is EnableReduction
            continue
        if any(read.name in stored for read in node.read_writes.reads):  # type: ignore[union-attr]
            return True
        # What a row has one of stays in registers: sums, and all that is computed between loops.
        if in_loop and not node.is_reduction():
            writes = node.read_writes.writes  # type: ignore[union-attr]
            stored_in_this_loop |= {write.name for write in writes}
    return False
