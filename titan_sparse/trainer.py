"""Wires the parts (Trainer.__init__) and runs the steps (Trainer.train). No parallelism details, no kernels."""

import dataclasses
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_sparse.attention import ContextParallel, attend, backends
from titan_sparse.attention.observe.statistics import Recording, recording
from titan_sparse.attention.patterns import Pattern
from titan_sparse.config import padding_multiple, resolve_cp_intra, save
from titan_sparse.data import Batch, PackedLoader, build_loader, load_tokenizer
from titan_sparse.estimate.memory import Step, estimate, peak_gib, peak_phase, step_of
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.evaluation.validation import Validation
from titan_sparse.from_config import build_mask, build_pattern
from titan_sparse.loss import count_valid
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.decoder import MLP, Decoder
from titan_sparse.models.flavours import DecoderConfig, resolve
from titan_sparse.models.initialization import initialize
from titan_sparse.training.activation_checkpoint import AUTO, choose_recompute
from titan_sparse.training.banner import banner
from titan_sparse.training.checkpoint import Checkpointer, Progress, newest_checkpoint
from titan_sparse.training.float8 import check_device, convert_to_float8
from titan_sparse.training.metrics import MetricsLog
from titan_sparse.training.offload import OffloadedBlocks
from titan_sparse.training.optimizer import build_optimizer, build_schedule
from titan_sparse.training.parallelize import (
    build_context_parallel,
    build_meshes,
    choose_device,
    init_distributed,
    parallelize,
)
from titan_sparse.training.profiling import profiler
from titan_sparse.training.timeouts import meet, set_timeout
from titan_sparse.training.watch import Watch

if TYPE_CHECKING:
    from titan_sparse.config import Attention, Config

logger = logging.getLogger("titan_sparse")

_AUTO_SHARE = 0.9
"""Of the free memory, what attention_recompute = -1 counts on: the rest is for communicators, gaps and wrong estimates."""


class Trainer:
    """A training run. The config has passed config.check(); data is opened before any process group is.

    Raises ValueError, naming the key, for data, tokenizers and checkpoints that cannot be used.
    """

    def __init__(self, config: "Config"):
        self.config, training = config, config.training
        self.device, self.dtype = choose_device(training.device), getattr(torch, training.dtype)
        self.model_config = resolve(**dataclasses.asdict(config.model))
        if config.float8.enable:
            check_device(self.device)
        _check_initial_weights(config, self.model_config)
        self.loader = _open_data(config, self.model_config)
        self.validation = Validation(config, self.loader.tokenizer)
        self.stop_signals = 0
        torch.manual_seed(training.seed)
        if training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.kernel = backends.explain(
            config.attention.backend,
            self.device.type,
            self.dtype,
            self.model_config.head_dim,
            config.attention.block_size,
            slices=config.attention.window_sinks > 0,
        )

        if not dist.is_initialized():
            init_distributed(self.device, config.parallelism.first_step_timeout_seconds)
        cp_intra = resolve_cp_intra(config.parallelism, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.meshes = build_meshes(config.parallelism, cp_intra, self.device.type)
        self.cp = build_context_parallel(config.attention, self.meshes.cp)
        self.loader.shard = self.cp.shard
        self.loader.place = (
            functools.partial(_block_table, config.attention, self.cp)
            if self.cp.depends_on_mask
            else None
        )
        self.recomputed = self._recomputed_share()
        self.model = self._build_model()
        self.optimizers = build_optimizer(self.model, config.optimizer, self.device.type)
        self.schedule = build_schedule(self.optimizers, config.lr_scheduler, training.steps)
        self.progress = Progress(self.device)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            training.output_dir,
            self.model,
            self.optimizers,
            self.schedule,
            self.loader,
            self.progress,
        )
        self.metrics = MetricsLog(
            config.metrics,
            training.output_dir,
            training.steps,
            self.model_config,
            self.device,
            dist.get_world_size(),
            writes=dist.get_rank() == 0,
            float8=config.float8.enable,
        )
        self.scorer = Scorer(
            self.model,
            config,
            self.cp,
            self.device,
            self.loader.tokenizer,
            self.meshes.dp_rank,
            self.meshes.dp_size,
        )
        self.watch = Watch(config.parallelism.first_step_timeout_seconds)
        # Groups made after the world's have torch's own timeout so far, 10 minutes for NCCL.
        self._set_timeout(config.parallelism.first_step_timeout_seconds)

    def _recomputed_share(self) -> float:
        """activation_checkpoint.attention_recompute; for auto what the rank with the least memory needs."""
        share = self.config.activation_checkpoint.attention_recompute
        if share != AUTO:
            return share
        needed = torch.zeros(())
        if self.device.type == "cuda":
            free = _AUTO_SHARE * torch.cuda.mem_get_info(self.device)[0] / 2**30
            needed.fill_(choose_recompute(lambda share: peak_gib(self._step_size(share)), free))
        dist.all_reduce(needed, dist.ReduceOp.MAX)
        return needed.item()

    def _step_size(self, recomputed: float) -> Step:
        """What a step's memory depends on, with this share of attention recomputed."""
        config, attention = self.config, self.config.attention
        backend = backends.choose(
            attention.backend,
            self.device.type,
            self.dtype,
            self.model_config.head_dim,
            attention.block_size,
            slices=attention.window_sinks > 0,
        )
        step = step_of(
            config,
            self.model_config,
            build_pattern(attention),
            backend,
            dist.get_world_size(),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        return dataclasses.replace(step, attention_recompute=recomputed)

    def _build_model(self) -> Decoder:
        config = self.config
        call = functools.partial(
            _attend,
            pattern=build_pattern(config.attention),
            cp=self.cp,
            backend=config.attention.backend,
            recomputed=self.recomputed,
        )
        with torch.device("meta"):
            model = Decoder(self.model_config, call, self._mlp()).to(
                torch.promote_types(self.dtype, torch.float32)
            )
        if config.float8.enable:
            convert_to_float8(model, config.float8)
        if config.activation_checkpoint.offload:
            model.run_blocks = OffloadedBlocks(self.device)
        parallelize(
            model,
            self.meshes.fsdp,
            self.dtype,
            config.parallelism.reshard_after_forward,
            config.activation_checkpoint,
            config.compile,
            config.optimizer.offload,
        )
        model.to_empty(device="cpu" if config.optimizer.offload else self.device)
        initialize(model, config.training.seed, self.model_config, self.device)
        return model

    def _mlp(self) -> Callable[[DecoderConfig], nn.Module]:
        chunk, compiler = self.config.training.mlp_chunk_tokens, self.config.compile
        backend = compiler.backend if compiler.enable else ""
        return (
            functools.partial(ChunkedMLP, chunk_tokens=chunk, compile_backend=backend)
            if chunk
            else MLP
        )

    def train(self) -> None:
        """From the newest checkpoint to training.steps, or until SIGINT or SIGTERM: then the step ends, is saved."""
        self._announce()
        with self.watch:
            self._load()
            stopped = self._run_steps()
            self.checkpointer.close()
            if self.config.checkpoint.last_save_in_hf and not stopped:
                self._save_in_hf()
        self.metrics.close()
        logger.info(
            "stopped by a signal after step %d" if stopped else "finished %d steps",
            self.progress.step,
        )

    def _load(self) -> None:
        initial_hf = self.config.model.initial_hf
        if self.checkpointer.load():
            instead = (
                f", from the run's own checkpoint and not from model.initial_hf = {initial_hf}"
            )
            logger.info("resumed at step %d%s", self.progress.step, instead if initial_hf else "")
        elif initial_hf:
            from titan_sparse.models.huggingface import load_weights

            load_weights(self.model, initial_hf, self.model_config)
            logger.info("read the weights of %s", initial_hf)

    def _save_in_hf(self) -> None:
        self._set_timeout(
            self.config.parallelism.first_step_timeout_seconds
        )  # the others wait for rank 0
        if dist.get_rank() == 0:
            initial_hf = self.config.model.initial_hf
            self.checkpointer.save_in_hf(
                self.progress.step, self.model_config, self.dtype, initial_hf
            )
        meet()

    def _run_steps(self) -> bool:
        """Returns whether a signal ended them."""
        config = self.config
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        gc.disable()  # collected at the same steps on all ranks, so that none makes the others wait
        stopped, first = False, self.progress.step + 1
        with profiler(config.profiling, config.training.output_dir, dist.get_rank()) as profile:
            while self.progress.step < config.training.steps and not stopped:
                self.watch.step = self.progress.step + 1
                stopped = self.step()
                self._after_step(stopped, profile, is_first=self.progress.step == first)
        gc.enable()
        for number, handler in previous.items():
            signal.signal(number, handler)
        return stopped

    def step(self) -> bool:
        """One optimizer step. Returns whether any rank was asked to stop."""
        batches = [
            next(self.loader) for _ in range(self.config.training.gradient_accumulation_steps)
        ]
        valid, tokens, stop = self._totals(batches)
        step = self.progress.step + 1
        logged, loss = (
            self.metrics.should_log(step),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        for number, batch in enumerate(batches):
            watch = logged and number == len(batches) - 1
            pictures = self.metrics.thumbnail_cells(step)
            with (
                recording(self.metrics.recall_rows(step), pictures)
                if watch
                else nullcontext() as seen
            ):
                loss += self._forward_backward(batch, valid)
        grad_norm = self._clip()
        learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
        self.checkpointer.before_update()
        self.optimizers.step()
        self.schedule.step()
        self.optimizers.zero_grad()
        self.progress.step, self.progress.tokens_seen = step, self.progress.tokens_seen + tokens
        self.metrics.count(tokens)
        if logged:
            dist.all_reduce(loss)
            values = {"loss": loss.item(), "grad_norm": grad_norm.item(), "lr": learning_rate}
            self._log(values, seen, batches[-1])
        return stop

    def _totals(self, batches: list[Batch]) -> tuple[int, int, bool]:
        """Over the world: labels that count, tokens consumed (each once), and whether any rank was asked to stop.

        On the CPU, so that no GPU is waited for.
        """
        labels = sum(int(count_valid(batch.labels)) for batch in batches)
        tokens = sum(sum(lengths) for batch in batches for lengths in batch.lengths)
        # All ranks of a context-parallel group see the same sequences: one of them counts their tokens.
        totals = torch.tensor([labels, tokens if self.cp.rank == 0 else 0, self.stop_signals])
        dist.all_reduce(totals)
        labels, tokens, signals = totals.tolist()
        return max(labels, 1), tokens, signals > 0

    def _forward_backward(self, batch: Batch, valid: int) -> Tensor:
        """This rank's share of the mean loss over `valid` labels, gradients left in the parameters."""
        tokens, labels = batch.tokens.to(self.device), batch.labels.to(self.device)
        seq_len = tokens.shape[1] * self.cp.size
        rows = build_mask(self.config.attention, batch.lengths).rows(seq_len, self.device)
        rows = rows._replace(table=None if batch.table is None else batch.table.to(self.device))
        positions = batch.positions
        if self.config.attention.mask == "causal":
            positions = self.cp.shard(
                torch.arange(seq_len).expand(tokens.shape[0], -1), 1, batch.table
            )
        training = self.config.training
        loss = (
            self.model(
                tokens,
                positions.to(self.device),
                rows,
                labels,
                training.loss_chunk_tokens,
                training.z_loss,
            )
            / valid
        )
        loss.backward()
        return loss.detach()

    def _clip(self) -> Tensor:
        """Scale gradients down to training.max_norm; returns their norm before that."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.training.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.config.training.max_norm, norm
            )
        return norm

    def _log(self, values: dict[str, float], seen: Recording, batch: Batch) -> None:
        sequence_tokens = sum(map(sum, batch.lengths)) / len(batch.lengths)
        self.metrics.log(
            self.progress.step, self.progress.tokens_seen, values, seen, sequence_tokens
        )

    def _after_step(self, stopped: bool, profile, is_first: bool) -> None:
        step, training = self.progress.step, self.config.training
        is_last = stopped or step == training.steps
        saves, validates = self.checkpointer.is_due(step, is_last), self.validation.is_due(step)
        if saves or validates:
            # Disks may be slow, and not alike; what has not been compiled for validation is, at first.
            self._set_timeout(self.config.parallelism.first_step_timeout_seconds)
        if saves:
            self.checkpointer.save(step, is_last)
        if validates:
            self.validation.run(self.scorer, step, self.metrics.board, writes=dist.get_rank() == 0)
            self.metrics.start_interval()
        if saves or validates or is_first:
            meet()
            self._set_timeout(self.config.parallelism.timeout_seconds)
        if step % training.gc_interval == 0:
            gc.collect(1)
        if profile is not None:
            profile.step()

    def _set_timeout(self, seconds: int) -> None:
        # What writes checkpoints in the background goes on through many steps: its group keeps the long timeout.
        short = seconds == self.config.parallelism.timeout_seconds
        set_timeout(seconds, without=self.checkpointer.background_groups() if short else [])
        self.watch.timeout_seconds = seconds

    def _on_signal(self, number: int, _) -> None:
        self.stop_signals += 1
        logger.info("signal %d: stopping after this step", number)

    def _announce(self) -> None:
        """Rank 0: the banner, and the resolved config in the run's folder."""
        if dist.get_rank() > 0:
            return
        step = self._step_size(self.recomputed)
        phases = estimate(step)
        print(
            banner(
                self.config,
                self.model_config,
                self.meshes,
                self.cp,
                self.kernel,
                self.device,
                step.seq_len,
                phases[peak_phase(phases)],
                self.recomputed,
            ),
            flush=True,
        )
        save(self.config, self.config.training.output_dir)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask,
    *,
    pattern: Pattern,
    cp: ContextParallel,
    backend: str,
    recomputed: float,
) -> Tensor:
    return attend(q, k, v, mask, pattern, cp, backend, recomputed=recomputed)


def _block_table(
    attention: "Attention", cp: ContextParallel, lengths: list[list[int]], seq_len: int
) -> Tensor:
    """For a layout that depends on the mask: the blocks of every rank in a batch, before it is sharded.

    No method: the loader would keep the trainer, and with it process groups, until Python has torn itself down, which ends
    in an abort."""
    return cp.balance(build_mask(attention, lengths).rows(seq_len)).table


def _check_initial_weights(config: "Config", model: DecoderConfig) -> None:
    """Refuses a model.initial_hf that does not fit, unless the run resumes from its own checkpoint: ValueError."""
    resumes = config.checkpoint.enable and newest_checkpoint(config.training.output_dir) is not None
    if config.model.initial_hf and not resumes:
        from titan_sparse.models.huggingface import (
            check_weights,
        )  # only where asked for: it needs safetensors

        check_weights(config.model.initial_hf, model)


def _open_data(config: "Config", model: DecoderConfig) -> PackedLoader:
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is too small for data.tokenizer {config.data.tokenizer}; "
            f"write {tokenizer.vocab_size} or more"
        )
    cp = config.parallelism.cp
    return build_loader(
        config.data,
        config.training.seq_len,
        config.training.local_batch_size,
        config.training.seed,
        dp_rank=int(os.environ.get("RANK", 0)) // cp,
        dp_size=int(os.environ.get("WORLD_SIZE", 1)) // cp,
        padding_multiple=padding_multiple(config),
        tokenizer=tokenizer,
    )
