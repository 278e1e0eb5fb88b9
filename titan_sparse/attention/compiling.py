"""torch.compile without the two fusions of inductor that make gradients wrong, silently.

* Reductions over rows fused with reductions over columns, as the backward of a norm has them, may
  leave one of the results unwritten (pytorch/pytorch#193061): torch 2.10 to 2.14.
* A kernel that goes over its rows twice may read back what it stored the first time, before other
  threads have stored it (triton-lang/triton#10924): torch 2.10 to 2.13. With Gemma 3's norms of q
  and k, gradients were off by up to half.
"""

import torch

UNWRITTEN_BELOW = (2, 15)
"""The first version of torch without the first error."""
READ_BACK_BELOW = (2, 14)
"""The first version of torch without the second error: a barrier stands before such loads."""


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

        from titan_sparse.attention.inductor_choices import ChoicesWithoutRaces

        inductor.inductor_choices_class = ChoicesWithoutRaces
        # Each thread makes its own choices at first use. Those that have compiled before, such as
        # the backward's, keep inductor's: so these change too.
        ours = ChoicesWithoutRaces.should_use_persistent_reduction
        InductorChoices.should_use_persistent_reduction = staticmethod(ours)  # type: ignore[method-assign]
