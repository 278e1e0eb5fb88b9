"""Where a run's tensors live: its device, its meshes, what FSDP does with weights, what is
compiled, recomputed, or offloaded, and float8. GPUs and other ranks are stand-ins."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.attention.collectives import collectives, counts
from tests.fake_step import fake_world
from tests.models.helpers import build, causal, dense_attend, sample
from tests.runs import TINY, tiny_config
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.config import ActivationCheckpoint, Compile, Float8, Parallelism
from titan_sparse.estimate.memory import peak_gib
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve
from titan_sparse.models.initialization import initialize
from titan_sparse.training import offload, preflight
from titan_sparse.training.faults.process_groups import build_meshes
from titan_sparse.training.model import check_float8, checkpointed, convert_to_float8, parallelize
from titan_sparse.training.offload import OffloadedBlocks
from titan_sparse.training.step_shape import step_of
from titan_sparse.training.trainer import Trainer

BLOCKS = TINY.layers


@pytest.mark.parametrize(
    "parallelism, cp_intra, fsdp, cp, dp",
    [
        # Weights are sharded over one axis: with two, fully_shard would copy them.
        (Parallelism(cp=4), 2, list(range(8)), [[4, 5], [6, 7]], (2, 1)),
        (Parallelism(dp_replicate=2, cp=2), 1, [[0, 1, 2, 3], [4, 5, 6, 7]], [[4], [5]], (4, 2)),
    ],
)
def test_meshes_by_hand(parallelism, cp_intra, fsdp, cp, dp):
    """Rank 5 of 8."""
    with fake_world(8, rank=5):
        meshes = build_meshes(replace(parallelism, cp_intra=cp_intra), "cpu")
        replicated = ("dp_replicate",) if parallelism.dp_replicate > 1 else ()
        assert meshes.fsdp.mesh_dim_names == (*replicated, "dp_shard_cp")
        assert meshes.fsdp.mesh.tolist() == fsdp
        assert meshes.cp.mesh_dim_names == ("cp_inter", "cp_intra")
        assert meshes.cp.mesh.tolist() == cp
        assert (meshes.dp_size, meshes.dp_rank) == dp


def _decoder(mesh: DeviceMesh, reshards: bool = True, compile: Compile | None = None) -> Decoder:
    """TINY with weights of 0.01, on rank 0 of a world whose collectives do nothing."""
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend)
    kept = ActivationCheckpoint("none")
    parallelize(model, mesh, torch.float32, reshards, kept, compile or Compile())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def _loss(model: Decoder) -> torch.Tensor:
    tokens, positions = sample(TINY)
    return model(tokens, positions, causal(tokens.shape[1]), labels=tokens)


@pytest.mark.parametrize("reshards", [True, False])
def test_weights_are_given_back_after_the_forward(reshards):
    with fake_world(2):
        model = _decoder(init_device_mesh("cpu", (2,)), reshards)
        with collectives() as forward:
            loss = _loss(model)
        for block in model.layers.values():
            is_sharded = [isinstance(weight, DTensor) for weight in block.parameters()]
            assert set(is_sharded) == {reshards}
        with collectives() as backward:
            loss.backward()
    # The root, which holds embedding and head, is gathered once, and blocks again if given back.
    assert counts(forward) == {"all_gather": BLOCKS + 1}
    said = {"reduce_scatter": BLOCKS + 1}
    if reshards:
        said["all_gather"] = BLOCKS
    assert counts(backward) == said


@pytest.mark.parametrize("enable", [False, True])
def test_blocks_are_compiled_if_asked_for(fresh_compiler, enable):
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled.append(graph)
        return graph.forward

    with fake_world(2), torch.no_grad():
        setting = Compile(enable=enable, backend=backend)
        _loss(_decoder(init_device_mesh("cpu", (2,)), compile=setting))
    # Blocks are alike: one graph serves all of them.
    assert len(compiled) == int(enable)


CONFIG = replace(TINY, tied_embeddings=False)
TOKENS = torch.randint(0, 258, (1, 64), generator=torch.Generator().manual_seed(0))


def _model(section: Float8 | None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(CONFIG, dense_attend).bfloat16()
    if section is not None:
        convert_to_float8(model, section, emulate=True)
    for name, block in model.layers.items():
        model.layers[name] = checkpointed(block, "full")
    model.to_empty(device="cpu")
    initialize(model, 0, CONFIG)
    return model


@pytest.mark.parametrize(
    "options, left_out, scales",
    [
        ({"recipe": "tensorwise"}, (), "tensorwise"),
        ({"recipe": "rowwise"}, (), "axiswise"),
        ({"filter": "o_proj, layers.0.mlp"}, ("o_proj", "layers.0.mlp"), None),
    ],
)
def test_the_blocks_linears_and_nothing_else(monkeypatch, options, left_out, scales):
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", False)
    with torch.device("meta"):
        model = Decoder(CONFIG, dense_attend)
    names = list(model.state_dict())
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = {name for name in linears if name.startswith("layers.")}
    wanted = {name for name in wanted if not any(part in name for part in left_out)}
    count = convert_to_float8(model, Float8(enable=True, **options), emulate=True)
    modules = model.named_modules()
    converted = {name for name, module in modules if type(module).__name__ == "Float8Linear"}
    assert converted == wanted and count == len(wanted) == (9 if left_out else 14)
    assert list(model.state_dict()) == names
    if scales:
        cast = model.layers["0"].mlp.up_proj.config.cast_config_input
        assert cast.scaling_granularity.value == scales
        assert torch._inductor.config.emulate_precision_casts == (scales == "axiswise")


def test_refusals():
    for name in ("attention", "layers"):
        with torch.device("meta"), pytest.raises(ValueError, match="float8.filter"):
            convert_to_float8(Decoder(CONFIG, dense_attend), Float8(filter=name), emulate=True)
    with pytest.raises(ValueError, match="float8.enable = true needs a Hopper GPU"):
        check_float8(torch.device("cpu"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_near(recipe):
    plain, float8 = _model(None), _model(Float8(enable=True, recipe=recipe))
    for model in (plain, float8):
        loss = model(TOKENS, torch.arange(64)[None], causal(64), TOKENS.roll(-1, 1)) / 64
        assert loss.dtype == torch.float32
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), float8.parameters(), strict=True):
        error = (a.grad - b.grad).float().norm() / a.grad.float().norm()
        assert error < 0.3, (name, error)
        # Three bits of mantissa must be seen in what goes through a converted layer.
        assert error > 0.01 or "layers" not in name or a.grad.norm() == 0, (name, error)


def test_a_run_recomputes_as_much_of_attention_as_its_memory_requires(texts, monkeypatch):
    """attention_recompute = -1 with free memory for the estimated peak of a share,
    of which 90 % count."""
    config = tiny_config(texts, "run", training__seq_len=640, attention__pattern="dense")
    model = resolve(**vars(config.model))
    for wanted, more in ((0.5, 1.001), (0.5625, 0.999), (0.0, 10), (1.0, 0.1)):
        config.activation_checkpoint.attention_recompute = 0.5
        peak = peak_gib(step_of(config, model, "eager", 1, 1))
        config.activation_checkpoint.attention_recompute = -1.0
        monkeypatch.setattr(preflight, "free_gib", lambda device, free=more * peak / 0.9: free)
        assert Trainer(config).recomputed == wanted


# Offload

LAYERS, LENGTH, HIDDEN, HEADS, HEAD_DIM = 3, 256, 32, 4, 8
THREE_LAYERS = replace(TINY, layers=LAYERS)
PATTERN = VerticalSlash(recall=0.8, sinks=2, local_slashes=1, max_verticals=32, dense_below=64)
CPU = torch.device("cpu")


@pytest.fixture
def small_tensors_too(monkeypatch, fresh_compiler) -> None:
    # LSE, but neither norms nor biases
    monkeypatch.setattr(offload, "MIN_BYTES", LENGTH * HEADS * 4)


def _checkpointed_decoder(backend: object, blocks: OffloadedBlocks | None = None) -> Decoder:
    """fp32, checkpointed and compiled block by block."""
    sparse = functools.partial(attend, pattern=PATTERN, block_size=16, backend="eager")
    model = build(THREE_LAYERS, dtype=torch.float32, attend=sparse)
    for name, block in model.layers.items():
        model.layers[name] = checkpointed(block, "full")
        model.layers[name].compile(backend=backend, fullgraph=True)
    if blocks is not None:
        model.run_blocks = blocks
    return model


def _loss_of_two_documents(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, 200, (2, 1, LENGTH), generator=generator)
    documents = Documents([[100 + seed, 156 - seed]]).rows(LENGTH)
    return model(tokens, torch.arange(LENGTH)[None], documents, labels)


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def _assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(map(torch.equal, got, want)) and len(got) == len(want)


@pytest.mark.usefixtures("small_tensors_too")
def test_offloaded_steps_are_the_same_to_the_bit_and_the_pool_stays():
    plain, wanted = _checkpointed_decoder("aot_eager"), []
    for seed in (0, 1):
        loss = _loss_of_two_documents(plain, seed)
        loss.backward()
        wanted.append((loss.detach(), _gradients(plain)))
    blocks = OffloadedBlocks(CPU)
    counter = CompileCounterWithBackend("aot_eager")
    model = _checkpointed_decoder(counter, blocks=blocks)
    sizes = set()
    for seed in (0, 1, 0):
        loss = _loss_of_two_documents(model, seed)
        loss.backward()
        wanted_loss, wanted_gradients = wanted[seed]
        assert torch.equal(loss, wanted_loss)
        _assert_equal(_gradients(model), wanted_gradients)
        sizes.add(blocks.pool.nbytes)
        given_back = sum(size * len(buffers) for size, buffers in blocks.pool.free.items())
        assert given_back == blocks.pool.nbytes, "buffers were not given back"
        with torch.no_grad():
            _loss_of_two_documents(model, 1 - seed)
    assert len(sizes) == 1, "the pool grew"
    # With gradients and without.
    assert counter.frame_count <= 2, "compiled anew"
    buffers = {nbytes: len(free) for nbytes, free in blocks.pool.free.items()}
    # Input and out of each block, and its LSE.
    wide = LENGTH * HIDDEN * 4
    lse = LENGTH * HEADS * 4
    assert buffers.pop(wide) == 2 * (LAYERS - 1)
    assert buffers.pop(lse) == LAYERS - 1
    # What is left are the verticals that the pattern has gathered.
    (verticals,) = buffers
    assert verticals % (2 * HEADS * HEAD_DIM * 4) == 0
    assert buffers[verticals] == LAYERS - 1
    assert blocks.pool.nbytes == (LAYERS - 1) * (2 * wide + lse + verticals)

    # Two forwards before their backwards: not last in, first out.
    losses = [_loss_of_two_documents(model, seed) for seed in (0, 1)]
    with torch.no_grad():
        _loss_of_two_documents(model, 2)
    for loss, (_, wanted_gradients) in zip(losses, wanted, strict=True):
        loss.backward()
        _assert_equal(_gradients(model), wanted_gradients)


@pytest.mark.usefixtures("small_tensors_too")
def test_what_is_kept_may_not_change():
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    class ChangesTheFirstInput(Square):
        def forward(self, x: Tensor) -> Tensor:
            first.add_(1)
            return x

    first = torch.randn(64, 64, requires_grad=True).clone()
    with pytest.raises(RuntimeError, match="changed in place"):
        OffloadedBlocks(CPU)([Square(), ChangesTheFirstInput(), Square()], first)
