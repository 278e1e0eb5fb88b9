"""torch.compile without the two fusions of inductor that make gradients wrong, silently.

* Reductions over rows fused with reductions over columns, as the backward of a norm has them, may
  leave one of the results unwritten (pytorch/pytorch#193061): torch 2.10 to 2.14.
* A kernel that goes over its rows twice may read back what it stored the first time, before other
  threads have stored it (triton-lang/triton#10924): torch 2.10 to 2.13. With Gemma 3's norms of q
  and k, gradients were off by up to half.
"""

import functools
from typing import Any

import torch

UNWRITTEN_BELOW = (2, 15)
"""The first version of torch without the first error."""
READ_BACK_BELOW = (2, 14)
"""The first version of torch without the second error: a barrier stands before such loads."""
_LARGEST_ROW = 16384
"""Elements of a row that a program can hold: more than any norm here has."""


@torch.compiler.assume_constant_result
def switch_wrong_fusions_off() -> None:
    """Switch both fusions off for the whole process. Versions of torch without the error are left
    alone. Loads inductor, which takes a second.

    Attention calls this while torch.compile traces its caller: dynamo traces a function before
    inductor compiles it.
    """
    from torch._inductor import config as inductor

    if torch.__version__ < UNWRITTEN_BELOW:  # type: ignore[operator]
        inductor.triton.mix_order_reduction = False
    if torch.__version__ < READ_BACK_BELOW:  # type: ignore[operator]
        from torch._inductor.choices import InductorChoices

        ours = _choices_without_races()
        inductor.inductor_choices_class = ours
        # Each thread makes its own choices at first use. Those that have compiled before, such as
        # the backward's, keep inductor's: so these change too.
        holds_rows = staticmethod(ours.should_use_persistent_reduction)
        InductorChoices.should_use_persistent_reduction = holds_rows  # type: ignore[method-assign]


@functools.cache
def _choices_without_races() -> Any:
    """InductorChoices by which kernels that would read back their own stores keep whole rows in
    registers instead."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    holds_rows_in_inductor = InductorChoices.should_use_persistent_reduction

    class ChoicesWithoutRaces(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction: bool) -> bool:
            """True if a kernel holds whole rows, as inductor asks it for each reduction."""
            fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LARGEST_ROW)
            if fits and _reads_back(features):
                return True
            return holds_rows_in_inductor(features, cooperative_reduction)

        def uuid(self) -> str:
            """Says in the keys of inductor's caches what kernels were made with."""
            return "titan_sparse: no kernel reads back what it stored, 1"

    return ChoicesWithoutRaces


def _reads_back(features) -> bool:
    """True if a kernel that went over its rows in loops would load what an earlier loop stored.

    features: SIMDKernelFeatures of inductor.
    """
    from torch._inductor.codegen.simd_kernel_features import DisableReduction, EnableReduction

    stored: set[str] = set()
    stored_in_this_loop: set[str] = set()
    in_loop = True
    for node in features.node_schedule:
        if node in (DisableReduction, EnableReduction):
            stored |= stored_in_this_loop
            stored_in_this_loop = set()
            in_loop = node is EnableReduction
            continue
        if any(read.name in stored for read in node.read_writes.reads):
            return True
        # What a row has one of stays in registers: sums, and all that is computed between loops.
        if in_loop and not node.is_reduction():
            stored_in_this_loop |= {write.name for write in node.read_writes.writes}
    return False
