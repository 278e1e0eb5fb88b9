"""A training run: its parts from top to bottom, then the loop."""

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from titan_sparse.attention.observe import recording
from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Config, changes, save, to_toml
from titan_sparse.config.sources import tokenizer_name
from titan_sparse.config.start import is_first_rank
from titan_sparse.data import Batch
from titan_sparse.estimate.constants import costs_of_run
from titan_sparse.evaluation.scorer import Interrupted
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.loss import count_valid
from titan_sparse.models.flavours import resolve
from titan_sparse.options.values import MOST
from titan_sparse.training import export, preflight
from titan_sparse.training.attention import (
    attention_line,
    block_table,
    build_attends,
    build_context_parallel,
    build_layer_masks,
    build_shard,
    choose_backend,
    probe_seed,
    sparse_from,
    why_dense,
)
from titan_sparse.training.checkpoint.checkpointer import Checkpointer, Progress
from titan_sparse.training.checkpoint.folders import check_lock, lock_run, unlock_run
from titan_sparse.training.checkpoint.saver import check_async_mode
from titan_sparse.training.faults import process_groups
from titan_sparse.training.faults.guard import Guard, decides_on_device, refuse_bad_weights
from titan_sparse.training.faults.heartbeat import Watch
from titan_sparse.training.faults.launcher import StopSignals
from titan_sparse.training.load import build_run_scorer
from titan_sparse.training.metrics import MetricsLog
from titan_sparse.training.metrics_output import open_wandb
from titan_sparse.training.model import (
    build_model,
    check_float8,
    draw_dropout,
    model_line,
    without_dropout,
)
from titan_sparse.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from titan_sparse.training.recovery import Recovery, decide
from titan_sparse.training.run_folder import begin_start, profiler, report_end
from titan_sparse.training.step_graphs import Computed, MicroBatch, StepGraphs, explain
from titan_sparse.training.step_shape import memory_line
from titan_sparse.training.validation import Validator

logger = logging.getLogger("titan_sparse")


class Trainer:
    """A training run. The config has passed config.check(). Collective.

    Raises ValueError, naming the key, for data, tokenizers, and checkpoints that cannot be used.
    """

    def __init__(self, config: Config):
        self.config = config
        training, parallelism = config.training, config.parallelism

        # What may be refused comes first, before any process group exists.
        self.device = process_groups.choose_device(training.device)
        check_async_mode(config.checkpoint, self.device)
        self.model_config = resolve(**vars(config.model))
        if config.float8.enable:
            check_float8(self.device)
        preflight.check_initial_weights(config, self.model_config)
        self.loader = preflight.open_data(config, self.model_config)
        tokenizer = self.loader.tokenizer
        # What is trained in place of all weights.
        self.adapters = preflight.adapters_to_train(config, self.model_config, tokenizer)
        # What a checkpoint's config.toml does not say of the run.
        self.origin = changes.Origin(
            self.model_config,
            tokenizer.digest,
            self.device.type,
            preflight.base_digest(config),
            self.loader.fingerprint(),
        )
        # Refuse a checkpoint of other data, or of another model.
        saved = changes.read_saved(preflight.checkpoint_to_resume(config))
        changes.refuse_changes(saved, config, self.origin)
        self.validation = Validator(config, tokenizer)
        if training.deterministic:
            # Of torch and cuBLAS. A backend of attention may be refused for it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        # The backend of attention, and the reason for it, for people.
        self.backend, self.kernel = choose_backend(config, self.model_config, self.device)
        costs = costs_of_run(config, self.model_config)
        self.has_graphs, self.queueing = explain(config, self.model_config, self.device.type)
        alike_in_run = preflight.alike(config) | preflight.alike_in_training(
            config, self.origin, self.backend, self.loader, self.validation
        )

        # Rank 0 owns the folder from here on, and all ranks meet.
        if is_first_rank():
            lock_run(training.output_dir)
        wandb_run = open_wandb(config)
        torch.manual_seed(training.seed)
        process_groups.init_distributed(
            self.device, parallelism.first_step_timeout_seconds, alike_in_run
        )
        self.start_folder = begin_start(config, self.device)
        self.meshes = process_groups.build_meshes(parallelism, self.device.type)

        # Attention over the ranks that share a sequence, and the data that each of them reads.
        attention = config.attention
        self.cp = build_context_parallel(attention, self.meshes.cp, costs)
        self.loader.shard = build_shard(self.model_config, self.cp)
        if self.cp.depends_on_mask:
            self.loader.block_table = functools.partial(block_table, attention, self.cp)
        # Share of attention that the backward computes again.
        self.recomputed = preflight.recomputed_share(
            config, self.model_config, self.backend, self.device
        )
        attends = build_attends(attention, self.cp, self.recomputed)
        # Tokens of the shortest document that can be sparse.
        self.sparse_from = sparse_from(attention)

        # The model, and what updates it.
        self.model = build_model(
            config, self.model_config, self.adapters, attends, self.meshes.fsdp, self.device
        )
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device.type)
        graphs = config.compile.cuda_graphs if self.has_graphs else "off"
        self.graphs = StepGraphs(self.model, self.cp, graphs)
        self.progress = Progress(self.device)
        self.guard = Guard(
            config.guard, self.device, decides_on_device(self.optimizer, self.device)
        )

        # What the run writes.
        self.checkpointer = Checkpointer(
            config.checkpoint,
            training.output_dir,
            self.model,
            self.optimizer,
            self.loader,
            self.progress,
            states={"guard": self.guard},
            texts={
                "config.toml": to_toml(self._going_on()),
                changes.ORIGIN_FILE: changes.origin_text(self.origin),
            },
        )
        self.recovery = Recovery(config, self.guard, self.checkpointer, self.progress)
        self.scorer = build_run_scorer(
            config, self.model, self.model_config, tokenizer, self.meshes, self.cp, self.device
        )
        self.metrics = MetricsLog(config, self.model_config, self.device, wandb_run)

        # What stops it, and how far it is.
        self.signals = StopSignals()
        self.scorer.must_stop = self._asked_to_stop
        self.watch = Watch(
            parallelism.first_step_timeout_seconds,
            self.signals,
            self.start_folder,
            self.graphs.is_running,
        )
        # Seconds of the last step: a stop in the middle of a step estimates the rest with it.
        self.step_seconds = 0.0
        # The step whose state is on disk.
        self.saved_step = 0
        # A save was due in the middle of bad steps.
        self.save_is_late = False
        # Groups made after the world's have torch's own timeout so far, 10 minutes for NCCL.
        self._use_long_timeout()

    def train(self) -> bool:
        """Train from the newest checkpoint to training.steps.

        SIGINT or SIGTERM ends the run earlier, after the last step that is finished within
        training.stop_grace_seconds. Its state is saved. Returns whether a signal came.
        """
        self._announce()
        with self.signals, self.watch, contextlib.closing(self.loader):
            self._load()
            self.saved_step = began_after = self.progress.step
            stopped = self._run_steps()
            self.graphs.free()
            self.checkpointer.close()
            if self.config.checkpoint.last_save_in_hf and not stopped:
                # The other ranks wait for rank 0.
                self._use_long_timeout()
                export.export_run(self.config, self.progress.step)
        self.metrics.close()
        unlock_run(self.config.training.output_dir)
        report_end(self.config, began_after, self.progress.step, stopped)
        return stopped

    def _going_on(self) -> Config:
        """The configuration with which the run goes on. checkpoint.load_step is of this start."""
        section = dataclasses.replace(self.config.checkpoint, load_step=-1)
        return dataclasses.replace(self.config, checkpoint=section)

    def _load(self) -> None:
        """Resume from the run's newest checkpoint, else read model.initial_hf, if any."""
        config = self.config
        # A checkpoint does not hold frozen weights.
        if self.adapters:
            preflight.read_initial_hf(config, self.model, self.model_config)
        if self.checkpointer.load():
            step = self.progress.step
            logger.info("resumed at step %d", step)
            # Not always the one looked at first, which may have been damaged.
            saved = changes.read_saved(preflight.step_path(config, step))
            changes.refuse_changes(saved, config, self.origin)
            for change in changes.changes(saved, config):
                logger.info("changed since the checkpoint: %s", change)
        elif not self.adapters:
            preflight.read_initial_hf(config, self.model, self.model_config)
        self.checkpointer.check_disk()
        refuse_bad_weights(self.model, self.device)

    def _run_steps(self) -> bool:
        """All steps that are left. Returns whether a signal ended them."""
        training = self.config.training
        if self.progress.step == 0 and self.validation.is_due(0):
            # With the timeouts of a first step.
            self._validate()
        first_step = self.progress.step + 1
        stopped = False
        gc.disable()  # collected at the same steps on all ranks, so that none makes the others wait
        try:
            with profiler(self.config.profiling, training.output_dir, dist.get_rank()) as step_done:
                while self.progress.step < training.steps and not stopped:
                    self.watch.step = self.progress.step + 1
                    stopped = self.step()
                    # A step that was left out leaves the one before it as the last.
                    is_first = self.progress.step == first_step and not stopped
                    self._after_step(stopped, is_first)
                    step_done(self.progress.step)
        finally:
            gc.enable()
        return stopped or self._asked_to_stop()

    def step(self) -> bool:
        """One optimizer step. Returns whether it was left out, as a rank was asked to stop."""
        config = self.config
        began = time.monotonic()
        loader = self.loader.state_dict()
        accumulated = config.training.gradient_accumulation_steps
        batches = [next(self.loader) for _ in range(accumulated)]
        valid, tokens, sparse, asked = self._totals(batches)
        step = self.progress.step + 1
        if step < config.training.steps and not asked:
            self.loader.read_ahead(accumulated)
        if step == 1 and self.adapters:
            tokenizer = self.loader.tokenizer
            preflight.warn_of_untrained_tokens(config, self.adapters, tokenizer, batches)
        is_logged = self.metrics.should_log(step)
        seed = probe_seed(config.training.seed, step)
        draw_dropout(config, step)

        # Gradients add up over the micro-batches. Attention is recorded in the last one, what caps
        # cut is counted in all.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches):
            if asked or (number > 0 and self._lacks_time(began, number, accumulated)):
                # This step is left out.
                self.graphs.clear_gradients()
                self.loader.load_state_dict(loader)
                return True
            records = None
            if is_logged and number == accumulated - 1:
                records = self.metrics.records(step)
            on_device = self._on_device(batch, valid, seed)
            computed = self.graphs(self._forward_backward, on_device, records, adds=number > 0)
            loss += computed.loss
            self.metrics.caps.add(computed.capped)

        with torch.profiler.record_function("Optimizer.update"):
            grad_norm = self._clip()
            rate = set_learning_rate(self.optimizer, config, self.progress.step)
            self.checkpointer.before_update()
            self.guard.update(step, loss, grad_norm, self.optimizer)
            self.graphs.clear_gradients()

        self.progress.step = step
        self.progress.tokens_seen += tokens
        self.metrics.count(tokens)
        self.recovery.count(all_of_them=is_logged)
        if is_logged:
            dist.all_reduce(loss)
            values = {
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
                "lr": rate,
                "skipped_updates": self.progress.skipped_updates,
            }
            if config.attention.mask == "documents" and self.sparse_from < MOST:
                values["sparse_tokens"] = sparse / max(tokens, 1)
            if sparse == 0 and not self.metrics.has_logged:
                preflight.warn_of_dense(config, self.model_config, self.loader, batches, step)
            lengths = batches[-1].lengths
            tokens_per_sequence = sum(sum(sequence) for sequence in lengths) / len(lengths)
            self.metrics.log(
                step, self.progress.tokens_seen, values, computed.recorded, tokens_per_sequence
            )
        self.step_seconds = time.monotonic() - began
        return False

    def _lacks_time(self, began: float, done: int, accumulated: int) -> bool:
        """True if the rest of the step and a save would outlast a rank's grace after a stop signal.
        Collective, on the CPU, so that no GPU is waited for. done: micro-batches.
        """
        seconds = max((time.monotonic() - began) / done, self.step_seconds / accumulated)
        grace = self.config.training.stop_grace_seconds
        # Until it is on disk, in the background too.
        save_seconds = self.checkpointer.last_save_seconds
        if save_seconds is None:
            save_seconds = grace / 2
        needed = (accumulated - done) * seconds + save_seconds
        return self._any_rank(not self.signals.has_time_for(needed, grace))

    def _asked_to_stop(self) -> bool:
        return self._any_rank(self.signals.asked)

    def _any_rank(self, condition: bool) -> bool:
        ranks = torch.tensor([int(condition)])
        dist.all_reduce(ranks)
        return ranks.item() > 0

    def _totals(self, batches: list[Batch]) -> tuple[int, int, int, bool]:
        """Over the world: labels that count, tokens consumed (each once), how many of these are in
        documents long enough to be sparse, and whether any rank was asked to stop. On the CPU, so
        that no GPU is waited for."""
        labels = sum(int(count_valid(batch.labels)) for batch in batches)
        documents = [n for batch in batches for lengths in batch.lengths for n in lengths]
        tokens = sum(documents)
        sparse = sum(n for n in documents if n >= self.sparse_from)
        # All ranks of a context-parallel group see the same sequences: one counts their tokens.
        if self.cp.rank > 0:
            tokens = sparse = 0
        totals = torch.tensor([labels, tokens, sparse, self.signals.asked])
        dist.all_reduce(totals)
        labels, tokens, sparse, ranks_asked = totals.tolist()
        return max(labels, 1), tokens, sparse, ranks_asked > 0

    def _on_device(self, batch: Batch, valid: int, seed: int) -> MicroBatch:
        """valid: labels of the step that count. seed: of the probe's rows."""
        device = self.device

        def moved(x: Tensor) -> Tensor:
            # From pinned memory, so that the host does not wait for the step before.
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        dtype = accumulation_dtype(getattr(torch, self.config.training.dtype))
        masks = build_layer_masks(
            self.config.attention,
            self.model_config,
            batch.lengths,
            batch.tokens.shape[1] * self.cp.size,
            self.cp,
            device,
            batch.table,
            moved(torch.tensor(seed)),
        )
        return MicroBatch(
            tokens=moved(batch.tokens),
            positions=moved(batch.positions),
            labels=moved(batch.labels),
            masks=masks,
            valid=moved(torch.tensor(valid, dtype=dtype)),
        )

    def _forward_backward(self, batch: MicroBatch, records: tuple[int, int] | None) -> Computed:
        training = self.config.training
        recorded = nullcontext() if records is None else recording(*records)
        with counting_caps() as capped, recorded as seen:
            total = self.model(
                batch.tokens,
                batch.positions,
                batch.masks,
                batch.labels,
                training.loss_chunk_tokens,
                training.z_loss,
            )
            loss = total / batch.valid
            loss.backward()
        return Computed(loss.detach(), capped, seen)

    def _clip(self) -> Tensor:
        # 0: no clipping.
        return clip_gradients(self.model.parameters(), self.config.training.max_norm or math.inf)

    def _after_step(self, stopped: bool, is_first: bool) -> None:
        """The actions due after a step: going back, saving, validation, collecting garbage. Raises
        Poisoned if the run has to go back and cannot."""
        step = self.progress.step
        training = self.config.training
        if dist.get_rank() == 0:
            check_lock(training.output_dir)
        is_last = stopped or step == training.steps
        is_due = self.checkpointer.is_due(step, is_last) and step != self.saved_step
        problem = self.recovery.problem(is_due or self.save_is_late, is_last)
        decision = decide(
            save_is_due=is_due or self.save_is_late,
            validation_is_due=self.validation.is_due(step) and not self._asked_to_stop(),
            is_last=is_last,
            stopped=stopped,
            has_problem=problem != "",
            bad_in_a_row=self.recovery.bad_in_a_row,
        )
        self.save_is_late = decision.save_is_late
        if decision.goes_back:
            self._use_long_timeout()
            self.saved_step = self.recovery.go_back(problem)
            self.metrics.go_back()
            self._use_short_timeout()
            return
        if problem and is_due:
            logger.error("step %d is not saved: %s", step, problem)
        if decision.saves or decision.validates:
            # Disks may be slow, and not alike. The first validation compiles what training has not.
            self._use_long_timeout()
        self.checkpointer.raise_failure()
        if decision.saves:
            self.loader.check_unchanged()
            self.metrics.leave_out(self.checkpointer.save(step))
            self.saved_step = step
            self.recovery.gone_back_to = None
        if decision.validates:
            self._validate()
        if decision.saves or decision.validates or is_first:
            self._use_short_timeout()
        if step % training.gc_interval == 0:
            gc.collect(1)

    def _validate(self) -> None:
        step = self.progress.step
        try:
            with without_dropout(self.model):
                self.validation.run(self.scorer, step, self.metrics)
        except Interrupted:
            # It may take longer than the grace after a signal, in which the state has to be saved.
            logger.info("the validation after step %d is left out", step)
        self.metrics.start_interval()

    def _use_long_timeout(self) -> None:
        """Before what may take long, and not the same time on all ranks: compilation, disks."""
        seconds = self.config.parallelism.first_step_timeout_seconds
        process_groups.set_timeout(seconds)
        self.watch.timeout_seconds = seconds

    def _use_short_timeout(self) -> None:
        """Once all ranks are here. Collective."""
        process_groups.barrier()
        seconds = self.config.parallelism.timeout_seconds
        # Writing checkpoints in the background may take long.
        process_groups.set_timeout(seconds, without=self.checkpointer.group)
        self.watch.timeout_seconds = seconds

    def _announce(self) -> None:
        if dist.get_rank() > 0:
            return
        config, cp, training = self.config, self.cp, self.config.training
        step = preflight.step_size(config, self.model_config, self.backend, self.recomputed)
        replicas, dp_size = config.parallelism.dp_replicate, self.meshes.dp_size
        sequences = training.local_batch_size * training.gradient_accumulation_steps * dp_size
        recomputed = ""
        if self.recomputed:
            recomputed = f" (attention of the first {100 * self.recomputed:g} % too)"
        lines = {
            "model": model_line(config, self.model_config, self.adapters),
            "mesh": f"{replicas} dp_replicate x {dp_size // replicas} dp_shard x {cp.inter} cp_inter "
            f"x {cp.intra} cp_intra on {self.device.type}",
            "data": f"{config.data.source}, tokenizer {tokenizer_name(config)}, {sequences} sequences "
            f"a step of {training.seq_len:,} tokens (padded to {step.seq_len:,}, "
            f"{step.seq_len // cp.size:,} a rank)",
            "attention": attention_line(config.attention),
            "note": why_dense(config, self.model_config, self.loader.longest_document()),
            "layout": f"{cp.layout}, schedule {cp.schedule}",
            "kernel": self.kernel,
            "blocks": f"activation checkpointing {config.activation_checkpoint.mode}{recomputed}, "
            + (
                f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
            ),
            "steps": self.queueing,
            "memory": memory_line(step, self.device),
            "output": training.output_dir,
        }
        shown = (f"{name:>10}  {text}" for name, text in lines.items() if text)
        logger.info("%s", "\n".join(shown))
        for line in self.loader.advice():
            logger.warning("%s", line)
        save(self._going_on(), training.output_dir)
