"""How many kernels a layer launches on one rank: at few tokens launches are its time.

What a GPU runs is counted on Triton's interpreter: our kernels, and torch's that are not views.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.reference import structured_qkv
from titan_sparse.attention import attend, call_tiles
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import priced, probe
from titan_sparse.attention.schedules import single, verticals
from titan_sparse.kernels import compact

NOT_LAUNCHED = ("empty", "new_empty", "empty_like")


class Launches(TorchDispatchMode):
    """Counts what is launched inside it, by name."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()
        self.is_in_kernel = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.__name__.partition(".")[0]
        if self.is_in_kernel or name in NOT_LAUNCHED or self.is_view(op, args, result):
            return result
        self.counted[name] += 1
        return result

    @staticmethod
    def is_view(op, args: tuple, result) -> bool:
        """Whether the result is its first argument's memory, unwritten."""
        if op.is_view:
            return True
        if not isinstance(result, Tensor) or not isinstance(args[0], Tensor):
            return False
        shares_memory = result.data_ptr() == args[0].data_ptr()
        return shares_memory and not op._schema.is_mutable

    def __enter__(self):
        launch = GridExecutor.__call__

        def counted_launch(executor, *args, **kwargs):
            self.counted[executor.fn.__name__] += 1
            self.is_in_kernel = True
            result = launch(executor, *args, **kwargs)
            self.is_in_kernel = False
            return result

        self.patch = mock.patch.object(GridExecutor, "__call__", counted_launch)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)


def on_interpreter(test):
    """A test that counts what Triton's interpreter runs."""
    reason = "launches are counted on the interpreter"
    return pytest.mark.skipif(torch.cuda.is_available(), reason=reason)(test)


@on_interpreter
def test_launches_of_attention(monkeypatch):
    """The second call's: what depends on the mask alone is remembered from the first."""
    monkeypatch.setattr(verticals, "_has_kernels", lambda x: True)
    monkeypatch.setattr(call_tiles, "_has_table_kernels", lambda call: True)
    counted = {}
    for name in ("forward", "backward"):
        compute = getattr(single, name)

        def counting(*args, name=name, compute=compute):
            with Launches() as launches:
                result = compute(*args)
            counted[name] = launches.counted
            return result

        monkeypatch.setattr(single, name, counting)

    q, k, v = structured_qkv(1, 2, 1, 256, 16, dtype=torch.float32)
    rows = Causal().rows(256, "cpu")
    pattern = VerticalSlash(recall=0.8)
    for _ in range(2):
        q.requires_grad_()
        out = attend(q, k, v, rows, pattern, block_size=64, backend="triton")
        out.backward(torch.ones_like(out))

    tables = {"_lists_kernel": 1, "_verticals_kernel": 1}
    assert counted["forward"] == tables | {"_gather_kernel": 1, "_forward_kernel": 1}
    assert counted["backward"] == tables | {
        "_kinds_kernel": 1,
        "_delta_kernel": 1,
        "_query_kernel": 1,
        "_key_kernel": 2,
        "_add_kernel": 1,
    }


@on_interpreter
@pytest.mark.parametrize("max_slashes", [0, 3])
def test_launches_of_selection(monkeypatch, max_slashes):
    """Fourteen kernels of ours; torch adds up by span, and fills a few flags with zeros."""
    for module in (probe, priced):
        monkeypatch.setattr(module, "by_kernels", lambda keys: True)
    monkeypatch.setattr(priced, "compact", compact.compact)
    monkeypatch.setattr(probe.kernels, "held_rows_naive", probe.kernels.held_rows)
    q, k, _ = structured_qkv(1, 2, 1, 256, 16, dtype=torch.float32)
    ranges = Causal().rows(256, "cpu")
    cp = one_rank(64)
    pattern = VerticalSlash(max_slashes=max_slashes)
    # Below the custom op, inside of which no mode sees anything.
    pattern.select_tensors(q, k, ranges, cp, 0.25)
    with Launches() as launches:
        pattern.select_tensors(q, k, ranges, cp, 0.25)
    ours = {name: n for name, n in launches.counted.items() if name.endswith("_kernel")}
    assert sum(ours.values()) == 14
    assert launches.counted - Counter(ours) == {"bmm": 1, "zeros": 1}
