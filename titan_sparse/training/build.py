"""Build the parts of a training run from its configuration. Whatever may be refused comes first."""

import dataclasses
import functools
import os

import torch

from titan_sparse.attention import backends
from titan_sparse.config import Attention, Config, resolve_cp_intra, to_toml, world_from_environment
from titan_sparse.config.changes import ORIGIN_FILE, Origin, origin_text, read_saved, refuse_changes
from titan_sparse.config.sources import tokenizer_name
from titan_sparse.estimate.constants import costs_of_run
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.models.config import adapter_elements, number_of_parameters
from titan_sparse.models.flavours import choose_implementation, resolve
from titan_sparse.models.lora import peft_config
from titan_sparse.options.values import show
from titan_sparse.training import step_graphs
from titan_sparse.training.attention import (
    backend_case,
    block_table,
    build_attends,
    build_context_parallel,
    build_scored_masks,
    build_shard,
    schedule_named,
    why_dense,
)
from titan_sparse.training.checkpoint.checkpointer import Checkpointer, Progress
from titan_sparse.training.checkpoint.folders import lock_run
from titan_sparse.training.checkpoint.saver import check_async_mode
from titan_sparse.training.faults.guard import Guard, decides_on_device
from titan_sparse.training.faults.process_groups import (
    build_meshes,
    choose_device,
    init_distributed,
)
from titan_sparse.training.metrics import MetricsLog
from titan_sparse.training.metrics_output import open_wandb
from titan_sparse.training.model import build_model, check_float8
from titan_sparse.training.optimizer import build_optimizer
from titan_sparse.training.preflight import (
    alike,
    alike_in_files,
    base_digest,
    build_adapters,
    check_initial_weights,
    check_new_tokens,
    checkpoint_to_resume,
    open_data,
    recomputed_share,
)
from titan_sparse.training.run_folder import begin_start
from titan_sparse.training.validation import Validator


class Parts:
    """What a training run is made of. The config has passed config.check(). Collective.

    Raises ValueError, naming the key, for data, tokenizers and checkpoints that cannot be used.
    """

    def __init__(self, config: Config):
        self.config = config
        alike_in_run = self._check()
        if os.environ.get("RANK", "0") == "0":
            lock_run(config.training.output_dir)
        wandb_run = open_wandb(config)
        torch.manual_seed(config.training.seed)
        self._join(alike_in_run)
        self._make()
        self.metrics = MetricsLog(config, self.model_config, self.device, wandb_run)

    def _check(self) -> dict[str, str]:
        """Whatever may be refused, before any process group exists. Returns what must be the same on
        all ranks."""
        config = self.config
        training = config.training
        self.device = choose_device(training.device)
        check_async_mode(config.checkpoint, self.device)
        self.model_config = resolve(**dataclasses.asdict(config.model))
        if config.float8.enable:
            check_float8(self.device)
        check_initial_weights(config, self.model_config)
        self.loader = open_data(config, self.model_config)
        # What is trained in place of all weights.
        self.adapters = build_adapters(config, self.model_config, self.loader.tokenizer)
        check_new_tokens(config, self.adapters, self.loader.tokenizer)
        if self.adapters:
            peft_config(self.adapters, self.model_config.tied_embeddings)
        # What a checkpoint's config.toml does not say of the run.
        self.origin = Origin(
            self.model_config,
            self.loader.tokenizer.digest,
            self.device.type,
            base_digest(config),
            self.loader.fingerprint(),
        )
        saved = read_saved(checkpoint_to_resume(config))
        if saved is not None:
            refuse_changes(saved, config, self.origin)
        self.validation = Validator(config, self.loader.tokenizer)
        # A backend may be refused for it.
        if training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        dtype = getattr(torch, training.dtype)
        shape = self.model_config.head_dim, training.seq_len
        case = backend_case(config.attention, self.device.type, dtype, *shape)
        self.backend = backends.choose(**case)
        # The backend and the reason for it, for people.
        self.kernel = backends.explain(**case)
        self.costs = costs_of_run(config, self.model_config)
        cp = config.parallelism.cp
        intra = resolve_cp_intra(config.parallelism, world_from_environment()[1])
        schedule = schedule_named(config.attention, cp // intra, intra)
        self.has_graphs, self.queueing = step_graphs.explain(
            config, self.model_config, self.device.type, schedule
        )
        return (
            alike(config)
            | {"the chosen attention.backend": self.backend}
            | alike_in_files(config, self.origin)
            | {"the digest of documents of data.source": self.loader.content_digest()}
            | {"the digest of validation.source": self.validation.content_digest()}
        )

    def _join(self, alike_in_run: dict[str, str]) -> None:
        config = self.config
        parallelism = config.parallelism
        init_distributed(self.device, parallelism.first_step_timeout_seconds, alike_in_run)
        self.start_folder = begin_start(config, self.device)
        cp_intra = resolve_cp_intra(parallelism, world_from_environment()[1])
        self.meshes = build_meshes(parallelism, cp_intra, self.device.type)
        self.cp = build_context_parallel(config.attention, self.meshes.cp, self.costs)
        self.loader.shard = build_shard(self.model_config, self.cp)
        if self.cp.depends_on_mask:
            self.loader.block_table = functools.partial(block_table, config.attention, self.cp)

    def _make(self) -> None:
        config = self.config
        training = config.training
        # Share of attention that the backward computes again.
        self.recomputed = recomputed_share(config, self.model_config, self.backend, self.device)
        attends = build_attends(config.attention, self.cp, self.recomputed)
        self.model = build_model(
            config, self.model_config, self.adapters, attends, self.meshes.fsdp, self.device
        )
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device.type)

        self.progress = Progress(self.device)
        on_device = decides_on_device(self.optimizer, self.device)
        self.guard = Guard(config.guard, self.device, on_device)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            training.output_dir,
            self.model,
            self.optimizer,
            self.loader,
            self.progress,
            states={"guard": self.guard},
            texts={"config.toml": to_toml(config), ORIGIN_FILE: origin_text(self.origin)},
        )
        self.scorer = Scorer(
            self.model,
            self.model_config,
            config,
            self.cp,
            self.device,
            self.loader.tokenizer,
            functools.partial(
                build_scored_masks, config.attention, self.model_config, self.cp, self.device
            ),
            self.loader.shard,
            self.meshes.dp_rank,
            self.meshes.dp_size,
        )


def banner(parts: Parts, padded_seq_len: int, memory: dict[str, float]) -> str:
    """What is about to run, on what, with which attention kernel and why.

    padded_seq_len: tokens of a sequence, padded to whole blocks of every rank. memory: GiB a device
    by part, at the step's peak.
    """
    config, cp = parts.config, parts.cp
    training, parallelism, attention = config.training, config.parallelism, config.attention
    replicas, dp_size = parallelism.dp_replicate, parts.meshes.dp_size
    sequences = training.local_batch_size * training.gradient_accumulation_steps * dp_size
    blocks = f"activation checkpointing {config.activation_checkpoint.mode}"
    if parts.recomputed:
        blocks += f" (attention of the first {100 * parts.recomputed:g} % too)"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    lines = {
        "model": _model(parts),
        "mesh": (
            f"{replicas} dp_replicate x {dp_size // replicas} dp_shard"
            f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {parts.device.type}"
        ),
        "data": (
            f"{config.data.source}, tokenizer {tokenizer_name(config)},"
            f" {sequences} sequences a step of {training.seq_len:,} tokens"
            f" (padded to {padded_seq_len:,}, {padded_seq_len // cp.size:,} a rank)"
        ),
        "attention": f"{attention.mask} mask, {_pattern(attention)}, blocks of {cp.block_size}",
        "note": why_dense(config, parts.model_config, parts.loader.longest_document()),
        "layout": f"{cp.layout}, schedule {cp.schedule}",
        "kernel": parts.kernel,
        "blocks": f"{blocks}, {compiled}",
        "steps": parts.queueing,
        "memory": _memory(parts.device, memory),
        "output": training.output_dir,
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items() if text)


def _pattern(attention: Attention) -> str:
    """The pattern with the options that differ from their defaults."""
    changed = getattr(attention, attention.pattern).changed()
    if attention.dense_layers:
        changed["dense_layers"] = attention.dense_layers
    options = [f"{name} = {show(value)}" for name, value in changed.items()]
    return " with ".join(filter(None, [attention.pattern, ", ".join(options)]))


def _memory(device: torch.device, memory: dict[str, float]) -> str:
    """memory: as for banner()."""
    # Others would show as 0.00.
    parts = [f"{name} {size:.2f}" for name, size in memory.items() if size >= 0.005]
    shown = f" ({', '.join(parts)})" if parts else ""
    line = f"expect tensors of at most {sum(memory.values()):.2f} GiB a device{shown}; steps log "
    if device.type == "cuda":
        return line + "the peak of PyTorch's allocator, which counts the same"
    return line + "the peak of the whole process, Python and libraries included"


def _model(parts: Parts) -> str:
    config, adapters = parts.config, parts.adapters
    initial_hf = config.model.initial_hf
    millions = number_of_parameters(parts.model_config) / 1e6
    dtype = config.training.dtype
    if adapters:
        trained = adapter_elements(parts.model_config, adapters) / 1e6
        dtype += (
            f", frozen, and {trained:,.1f} M that are trained: adapters of rank {adapters.rank} of "
            f"{', '.join(adapters.targets)}"
        )
        if adapters.tokens:
            dtype += f", and the rows of {len(adapters.tokens)} tokens"
    elif dtype != "float64":
        dtype += ", float32 weights and optimizer"
    line = f"{initial_hf or config.model.flavour}, {millions:,.1f} M parameters, {dtype}"
    if initial_hf:
        code, reason = choose_implementation(initial_hf, config.model.implementation)
        line += f"; {code} code ({reason})"
    return line
