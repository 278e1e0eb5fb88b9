"""torch.compile of a model with our attention: equal to eager, and without fusions that
make gradients wrong."""

import inspect
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.choices import InductorChoices

from tests.integrations.transformers.families import (
    assert_close,
    family,
    logits_and_gradients,
    tokens,
    with_ours,
)
from titan_sparse import attend
from titan_sparse.attention.compiling import READ_BACK_BELOW, UNWRITTEN_BELOW

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each graph that dynamo hands to its backend: whether both fusions are off. They are on at
    first."""
    keeps_rows = InductorChoices.should_use_persistent_reduction
    monkeypatch.setattr(
        InductorChoices, "should_use_persistent_reduction", staticmethod(keeps_rows)
    )
    with inductor.patch({"triton.mix_order_reduction": True, "inductor_choices_class": None}):
        yield []


def recorder(graphs: list[bool]):
    def backend(module, inputs):
        fuses_orders = torch.__version__ < UNWRITTEN_BELOW and inductor.triton.mix_order_reduction
        reads_back = torch.__version__ < READ_BACK_BELOW and inductor.inductor_choices_class is None
        graphs.append(not fuses_orders and not reads_back)
        return module.forward

    return backend


def test_every_graph_of_a_model_is_protected(graphs: list[bool]) -> None:
    model = with_ours("gemma3")
    wanted = logits_and_gradients(model, input_ids=tokens(2, 40))
    # Nothing is switched off before something is compiled.
    assert inductor.triton.mix_order_reduction
    compiled = torch.compile(model, backend=recorder(graphs))
    assert_close(logits_and_gradients(compiled, input_ids=tokens(2, 40)), wanted)
    assert len(graphs) > 2 and all(graphs)


def test_a_function_with_attend_is_protected(graphs: list[bool]) -> None:
    def layer(x: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, (16,))
        return attend(x, x, x, block_size=16)

    x = torch.randn(1, 2, 40, 16)
    wanted = layer(x)
    assert inductor.triton.mix_order_reduction
    found = torch.compile(layer, backend=recorder(graphs), fullgraph=True)(x)
    torch.testing.assert_close(found, wanted)
    assert graphs == [True]
    # Inductor's caches pickle its settings; what cannot be pickled is never cached.
    pickle.dumps(inductor.inductor_choices_class)


def test_other_models_alone_are_left_as_they_are(graphs: list[bool]) -> None:
    model = family("llama")
    model.set_attn_implementation("sdpa")
    torch.compile(model, backend=recorder(graphs))(tokens(2, 40))
    assert inductor.triton.mix_order_reduction
    assert inductor.inductor_choices_class is None


def test_this_torch_still_needs_the_protection() -> None:
    """Where this fails, the bounds in attention/compiling.py are wrong, and
    what they guard can go."""
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel

    # 2.15 writes a result that is a part of another buffer through a view of it.
    reduction = inspect.getsource(SIMDScheduling._codegen_mix_order_reduction)
    assert ("copy_(" not in reduction) == (torch.__version__ < UNWRITTEN_BELOW)
    # 2.14 waits for all threads before it loads what an earlier loop stored.
    load = inspect.getsource(TritonKernel.load)
    assert ("debug_barrier" not in load) == (torch.__version__ < READ_BACK_BELOW)
