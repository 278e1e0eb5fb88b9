"""Build the parts of a training run from its configuration. Whatever may be refused comes first."""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from titan_sparse.attention import ContextParallel, backends
from titan_sparse.config import Config, resolve_cp_intra, to_toml
from titan_sparse.config.changes import (
    ORIGIN_FILE,
    Origin,
    origin_text,
    read_saved,
    refuse_changes,
)
from titan_sparse.data import PackedLoader
from titan_sparse.estimate.constants import costs_of_run
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.evaluation.validation import Validation
from titan_sparse.from_config import (
    backend_case,
    block_table,
    build_attends,
    build_context_parallel,
)
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve
from titan_sparse.models.lora_config import Adapters
from titan_sparse.training.build_model import build_model, check_float8
from titan_sparse.training.checkpoint import (
    Checkpointer,
    NoCheckpoints,
    Progress,
    check_async_mode,
    lock_run,
)
from titan_sparse.training.distributed import Meshes, build_meshes, choose_device, init_distributed
from titan_sparse.training.guard import Guard, Recovery, decides_on_device
from titan_sparse.training.metrics import MetricsLog
from titan_sparse.training.metrics_output import open_tracker
from titan_sparse.training.optimizer import build_optimizer, build_schedule
from titan_sparse.training.run_folder import begin_start
from titan_sparse.training.setup import (
    alike,
    alike_in_files,
    base_digest,
    check_initial_weights,
    checkpoint_to_resume,
    find_adapters,
    local_world_size,
    open_data,
    recomputed_share,
    step_size,
)


@dataclass
class Parts:
    """What a training run is made of."""

    config: Config
    device: torch.device
    model_config: DecoderConfig
    adapters: Adapters | None
    """what is trained in place of all weights"""
    backend: str
    """of attention"""
    kernel: str
    """the backend and the reason for it, for people"""
    origin: Origin
    """what a checkpoint's config.toml does not say of the run"""
    start_folder: Path
    meshes: Meshes
    cp: ContextParallel
    recomputed: float
    """share of attention that the backward computes again"""
    loader: PackedLoader
    model: Decoder
    optimizers: OptimizersContainer
    schedule: LRSchedulersContainer
    progress: Progress
    guard: Guard
    checkpointer: NoCheckpoints
    recovery: Recovery
    metrics: MetricsLog
    scorer: Scorer
    validation: Validation


def build(config: Config) -> Parts:
    """Build a run. The config has passed config.check(). Collective.

    Raises ValueError, naming the key, for data, tokenizers and checkpoints that cannot be used.
    """
    training = config.training

    # First whatever may be refused, before any process group exists.
    device = choose_device(training.device)
    check_async_mode(config.checkpoint, device)
    model_config = resolve(**dataclasses.asdict(config.model))
    adapters = find_adapters(config, model_config)
    if config.float8.enable:
        check_float8(device)
    check_initial_weights(config, model_config)
    loader = open_data(config, model_config)
    origin = Origin(
        model_config,
        loader.tokenizer.digest,
        device.type,
        base_digest(config),
        loader.fingerprint(),
    )
    saved = read_saved(checkpoint_to_resume(config))
    if saved is not None:
        refuse_changes(saved, config, origin)
    validation = Validation(config, loader.tokenizer)
    # A backend may be refused for it.
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    dtype = getattr(torch, training.dtype)
    case = backend_case(config.attention, device.type, dtype, model_config.head_dim)
    backend = backends.choose(**case)
    costs = costs_of_run(config, model_config)
    if os.environ.get("RANK", "0") == "0":
        lock_run(training.output_dir)
    tracker = open_tracker(config)
    torch.manual_seed(training.seed)

    # Who works together, and on the same.
    init_distributed(
        device,
        config.parallelism.first_step_timeout_seconds,
        alike(config)
        | {"the chosen attention.backend": backend}
        | alike_in_files(config, origin)
        | {"the digest of documents of data.source": loader.content_digest()}
        | {"the digest of validation.source": validation.content_digest()},
    )
    start_folder = begin_start(config, device)
    cp_intra = resolve_cp_intra(config.parallelism, local_world_size())
    meshes = build_meshes(config.parallelism, cp_intra, device.type)
    cp = build_context_parallel(config.attention, meshes.cp, costs)
    table_of_batch = None
    if cp.depends_on_mask:
        table_of_batch = functools.partial(block_table, config.attention, cp)
    loader.use_layout(cp.shard, table_of_batch)

    # What is trained.
    size = functools.partial(step_size, config, model_config, backend)
    recomputed = recomputed_share(config, size, device)
    attends = build_attends(config.attention, cp, recomputed)
    model = build_model(config, model_config, attends, meshes.fsdp, device)
    optimizers = build_optimizer(model, config.optimizer, device.type)
    schedule = build_schedule(optimizers, config.lr_scheduler, training.steps)

    # What is saved and reported.
    progress = Progress(device)
    guard = Guard(config.guard, device, decides_on_device(optimizers, device))
    checkpointer = NoCheckpoints()
    if config.checkpoint.enable:
        checkpointer = Checkpointer(
            config.checkpoint,
            training.output_dir,
            model,
            optimizers,
            loader,
            progress,
            states={"guard": guard},
            texts={"config.toml": to_toml(config), ORIGIN_FILE: origin_text(origin)},
        )
    return Parts(
        config=config,
        device=device,
        model_config=model_config,
        adapters=adapters,
        backend=backend,
        kernel=backends.explain(**case),
        origin=origin,
        start_folder=start_folder,
        meshes=meshes,
        cp=cp,
        recomputed=recomputed,
        loader=loader,
        model=model,
        optimizers=optimizers,
        schedule=schedule,
        progress=progress,
        guard=guard,
        checkpointer=checkpointer,
        recovery=Recovery(config, guard, checkpointer, model, optimizers, schedule, progress),
        metrics=MetricsLog(config, model_config, device, dist.get_rank() == 0, tracker),
        scorer=Scorer(
            model,
            model_config,
            config,
            cp,
            device,
            loader.tokenizer,
            meshes.dp_rank,
            meshes.dp_size,
        ),
        validation=validation,
    )
