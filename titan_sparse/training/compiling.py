"""torch.compile of a decoder's layers, without what can make gradients wrong."""

from torch import nn
from torch._inductor import config as inductor
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


def compile_layer(layer: nn.Module, backend: str) -> None:
    """layer.compile() as one graph, in place, without two fusions of torch 2.10 to 2.13 that make
    gradients wrong, silently. What is turned off is so for the whole process. Only linear attention
    breaks the graph.

    * Reductions over rows fused with reductions over columns, as the backward of a norm has them,
      may leave one of the results unwritten (pytorch/pytorch#193061).
    * A kernel that goes over its rows twice may read back what it stored the first time, before
      other threads have stored it (triton-lang/triton#10924). With Gemma 3's norms of q and k,
      gradients were off by up to half: ChoicesWithoutRaces.
    """
    inductor.triton.mix_order_reduction = False
    inductor.inductor_choices_class = ChoicesWithoutRaces
    # Each thread makes its own choices at first use. Those that have compiled before, such as the
    # backward's, keep inductor's: so these change too.
    ours = ChoicesWithoutRaces.should_use_persistent_reduction
    InductorChoices.should_use_persistent_reduction = staticmethod(ours)
    is_linear = any(name.endswith("linear_attn") for name, _ in layer.named_modules())
    layer.compile(backend=backend, fullgraph=not is_linear)


class ChoicesWithoutRaces(InductorChoices):
    """Kernels that would read back their own stores keep whole rows in registers instead."""

    @staticmethod
    def should_use_persistent_reduction(
        features: SIMDKernelFeatures, cooperative_reduction: bool
    ) -> bool:
        """Whether a kernel holds whole rows, as inductor asks it for each reduction."""
        fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LARGEST_ROW)
        if fits and reads_back(features):
            return True
        return _holds_rows_in_inductor(features, cooperative_reduction)

    def uuid(self) -> str:
        """Says in the keys of inductor's caches what kernels were made with."""
        return "titan_sparse: no kernel reads back what it stored, 1"


def reads_back(features: SIMDKernelFeatures) -> bool:
    """Whether a kernel that went over its rows in loops would load what an earlier loop stored."""
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
