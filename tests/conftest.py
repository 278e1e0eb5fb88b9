"""Without a GPU, kernels run in Triton's interpreter, which must be switched on before the first
kernel is imported.

Each process uses one thread, since test processes share the cores.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
torch.set_num_threads(1)
# Each process that compiles would else start a compiler for every core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

# GPUS_TO_SHARE=4 pytest -n 16: each worker has one of so many GPUs to itself and its like.
if "GPUS_TO_SHARE" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(worker % int(os.environ["GPUS_TO_SHARE"]))


def patch_languages_once() -> None:
    """Make Triton's interpreter faster: let only the outermost call of a function
    patch triton.language.

    The interpreter replaces the builtins of triton.language at every call of every function, also
    of one that a kernel calls, such as tl.sum. That is most of its time. In an inner call they are
    replaced already, so nothing is left to do. Does nothing if Triton is missing or differs inside.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope") or not hasattr(interpreter, "_patch_lang"):
        return

    patch = interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch_what_is_left(function: FunctionType):
        named = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        wanted = {module for module in named if module in (language, language.core)}
        left = wanted - patched
        if not left:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = patch(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.clear()

        scope.restore = restore_and_forget
        patched.update(left)
        return scope

    interpreter._patch_lang = patch_what_is_left


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    patch_languages_once()


LONGEST = [
    "tests/gpu/test_context_parallel.py",
    "tests/gpu/test_training.py",
    "tests/gpu/test_examples.py",
    "tests/gpu/test_step_graphs.py",
    "tests/gpu/test_compiling.py",
    "tests/kernels/test_compile_only.py",
    "tests/training/test_trainer.py",
    "tests/training/test_wiring.py",
    "tests/training/test_metrics.py",
    "tests/docs/test_docs.py",
    "tests/training/faults/test_lost_ranks.py",
    "tests/training/test_starts_and_stops.py",
    "tests/training/test_lora.py",
    "tests/training/test_transformers_runs.py",
    "tests/training/faults/test_guard.py",
    "tests/faults/test_faults.py",
    "tests/training/checkpoint/test_checkpointer.py",
    "tests/attention/context_parallel/test_stress.py",
    "tests/attention/context_parallel/test_group.py",
    "tests/kernels/test_block_sparse.py",
    "tests/attention/context_parallel/test_balanced.py",
    "tests/attention/patterns/test_block_patterns.py",
    "tests/attention/context_parallel/test_group_cast.py",
    "tests/attention/test_recomputed.py",
    "tests/test_train.py",
    "tests/test_package.py",
    "tests/training/test_validation.py",
]
"""Files to begin with. A long one at the end would keep one core waiting for the other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, otherwise in the order of their names.

    Tests of kernels that run on the device that is there are tests of the GPU where there is one,
    and those of tests/gpu always. Without one they are skipped.
    """
    for item in items:
        device = getattr(getattr(item, "module", None), "DEVICE", "cpu")
        if device == "cuda" or item.nodeid.startswith("tests/gpu/"):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("needs a GPU"))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(LONGEST)))


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_for_the_next_file() -> Iterator[None]:
    """A training run in the tests' own process leaves a process group behind, which the next file's
    tests would use.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A training run in the tests' own process, or in a module fixture, configures logging."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("titan_sparse").setLevel(logging.NOTSET)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.NOTSET)
    yield


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """A training run changes settings of its process, which later tests share."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    gc.enable()
    if workspace is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.emulate_precision_casts = False


@pytest.fixture(autouse=True)
def _gpu_as_before(request: pytest.FixtureRequest) -> None:
    """Free now what earlier tests left on the GPU, and not while this test measures memory."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        return
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder for runs, with texts to train on."""
    from tests.runs import write_texts

    write_texts(tmp_path / "texts")
    return tmp_path


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compilations of other tests do not count in this one, nor those of this
    test in the next one."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
