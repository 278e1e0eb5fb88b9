"""Private names of other packages that we use. A new version of torch may change them without a
word, so that here is where to look first."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
FOLDERS = ("titan_sparse", "kernels", "scripts", "examples")
OF_NAMED_TUPLES = {"_replace", "_make", "_asdict", "_fields"}


INDUCTOR = "compiling.py turns off two fusions that make gradients wrong; no public switch does"
CHECKPOINTS = (
    "reader.py and saver.py: torch's format of checkpoints, read safely and with checksums"
)
JINJA = "chat_template.py: which characters the assistant wrote, by transformers' own renderer"
FLASH = "flex.py: FlashAttention-4's block tables and its LSE; the public function has neither"
CUDNN = "cudnn.py: with the LSE, for merging, and with a given LSE backward"
HANGS = "heartbeat.py: what each rank waited for when a job hung"

PRIVATE = {
    "deepspeed.runtime.sequence_parallel.parallel_state_sp ._SEQUENCE_PARALLEL_GROUP": (
        "refusals: whether DeepSpeed's ALST runs"
    ),
    "transformers.PretrainedConfig ._attn_implementation": "the name of the attention function that a model was given",
    "torch.nn.Module ._compiled_call_impl": "transformers_decoder.py: whether layers are compiled",
    "torch.distributed.ProcessGroup ._device_types": HANGS,
    "transformers.PretrainedConfig ._experts_implementation": (
        "transformers_decoder.py: what computes experts, as grouped matmuls do not take float64"
    ),
    "torch.nn.Module ._forward_pre_hooks": "linear.py: hooks must not be registered twice",
    "torch.distributed.ProcessGroup ._get_backend": HANGS,
    "torch._C._distributed_c10d.Backend ._get_sequence_number_for_group": HANGS,
    "torch.optim.Adam ._init_group": "optimizer.py: what an optimizer's step() computes on",
    "torch.nn.Module ._modules": "chunked_loss.py: named parts of a model, replaced for one forward without a hook",
    "transformers.Trainer ._prepare_inputs": "benchmarks: a batch as transformers' Trainer moves it to the GPU",
    "torch.Tensor ._version": "whether a tensor was changed in place since",
    "flash_attn.cute.interface._flash_attn_bwd": FLASH,
    "flash_attn.cute.interface._flash_attn_fwd": FLASH,
    "os._exit": "launcher.py: documented; ends a rank whose threads hang",
    "pickle._Unpickler": CHECKPOINTS,
    "pickle._Unpickler.dispatch": CHECKPOINTS,
    "sys._current_frames": "heartbeat.py: documented; the stacks of all threads",
    "torch._C._current_graph_task_id": "recorder.py: whether this is a backward",
    "torch._C._distributed_c10d._dump_nccl_trace": HANGS,
    "torch._C._functorch.is_batchedtensor": "inputs.py refuses torch.vmap",
    "torch._C._functorch.is_gradtrackingtensor": "inputs.py refuses torch.func.grad",
    "torch._C._functorch.is_legacy_batchedtensor": "inputs.py refuses is_grads_batched",
    "torch._assert_async": "loss.py: checks labels on the GPU, for which the host does not wait",
    "torch._dynamo.maybe_mark_dynamic": "ranges.py: one graph for any number of slices",
    "torch._foreach_mul_": "optimizer.py: all gradients in one launch, as torch's clipping does",
    "torch._foreach_norm": "guard.py, optimizer.py: all norms in one launch, without a copy",
    "torch._foreach_zero_": "step_graphs.py: all gradients in one launch",
    "torch._inductor.choices.InductorChoices": INDUCTOR,
    "torch._inductor.choices.InductorChoices.should_use_persistent_reduction": INDUCTOR,
    "torch._inductor.codegen.simd_kernel_features.DisableReduction": INDUCTOR,
    "torch._inductor.codegen.simd_kernel_features.EnableReduction": INDUCTOR,
    "torch._inductor.codegen.simd_kernel_features.SIMDKernelFeatures": INDUCTOR,
    "torch._inductor.config": INDUCTOR,
    "torch._inductor.config.emulate_precision_casts": "model.py: rounds as without compile",
    "torch._inductor.config.inductor_choices_class": INDUCTOR,
    "torch._inductor.config.triton.mix_order_reduction": INDUCTOR,
    "torch._inductor.virtualized.V": INDUCTOR,
    "torch._functorch.config.activation_memory_budget": "torchtitan: its memory-budget checkpointing",
    "torch._inductor.virtualized.V.graph.sizevars.statically_known_leq": INDUCTOR,
    "torch.cuda._sleep": "benchmarks: keeps the GPU busy until the host is ahead",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": (
        "model.py: names of parameters stay as they are; torchtitan uses it, too"
    ),
    "torch.distributed.checkpoint._nested_dict.flatten_state_dict": CHECKPOINTS,
    "torch.distributed.checkpoint._traverse.set_element": CHECKPOINTS,
    "torch.distributed.checkpoint.filesystem._StorageInfo": CHECKPOINTS,
    "torch.distributed.checkpoint.filesystem._split_by_size_and_type": CHECKPOINTS,
    "torch.distributed.distributed_c10d._get_default_store": "the store of a process group",
    "torch.distributed.distributed_c10d._world.pg_map": "all groups made so far, for their timeouts",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "huggingface.py: which rows of a file a rank reads"
    ),
    "torch.ops.aten._scaled_dot_product_cudnn_attention": CUDNN,
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": CUDNN,
    "torch.ops.aten._scaled_mm.default": "model.py: a costly result, kept for the backward",
    "torch.utils._pytree.tree_leaves": "offload.py, step_graphs.py: the tensors among arguments",
    "torch.utils._pytree.tree_map_only": "step_graphs.py: a copy of the tensors of a batch",
    "torchtitan.models.gpt_oss.model.Attention._apply_sinks": "torchtitan: where GPT-OSS has its sinks",
    "transformers.Qwen3ForCausalLM._from_config": "benchmarks: random weights in bfloat16",
    "transformers.utils.chat_template_utils._compile_jinja_template": JINJA,
    "transformers.utils.chat_template_utils._compile_jinja_template.__wrapped__": JINJA,
    "transformers.utils.chat_template_utils._render_with_assistant_indices": JINJA,
}
"""Name -> why we need it. What begins with a dot is an attribute of objects
of the type before it."""

INSTANCES = {
    # V.graph is there only while inductor compiles.
    "torch._inductor.virtualized.V.graph.sizevars.statically_known_leq": (
        "torch._inductor.sizevars.SizeVarAllocator.statically_known_leq"
    ),
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class _Finder(ast.NodeVisitor):
    """found: names with their modules, torch._C.x, and attributes of objects, .x"""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.modules: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            self.modules[alias.asname or name] = name
            self._note(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._note(f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        root = value.id if isinstance(value, ast.Name) else ""
        if root in self.modules:
            self._note(".".join([self.modules[root], *reversed(names)]))
            return
        is_ours = root in ("self", "cls") and len(names) == 1
        if _is_private(node.attr) and not is_ours:
            self.found.add(f".{node.attr}")
        self.visit(node.value)

    def _note(self, name: str) -> None:
        if not name.startswith("titan_sparse") and any(map(_is_private, name.split("."))):
            self.found.add(name)


def _trees() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text())


def found() -> set[str]:
    names: set[str] = set()
    ours: set[str] = set(OF_NAMED_TUPLES)
    for tree in _trees():
        finder = _Finder()
        finder.visit(tree)
        names |= finder.found
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                ours.add(node.attr)
    return {name for name in names if not (name.startswith(".") and name[1:] in ours)}


def _exists(path: str) -> bool:
    """Imports what can be imported of the path, and reads the rest as attributes."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(names[:count]))
            break
        except ImportError:
            continue
    else:
        return False
    for name in names[count:]:
        if name in getattr(value, "__annotations__", {}):
            return True  # instances have it
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_each_private_name_is_in_the_list():
    assert found() == {name.split()[-1] for name in PRIVATE}


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_a_private_name_is_still_there(name):
    if name.startswith("flash_attn."):
        pytest.importorskip("flash_attn")  # for Hopper GPUs only
    if name == "torch._C._distributed_c10d._dump_nccl_trace" and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    path = INSTANCES.get(name, name).replace(" ", "")
    if path.startswith("deepspeed."):
        pytest.importorskip("deepspeed")
    assert _exists(path), f"{path} is gone. {PRIVATE[name]}"
