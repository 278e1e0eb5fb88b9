"""A training run: Trainer.__init__ builds the parts, Trainer.train runs the steps.

No parallelism details and no kernels are here. What each part does is in the file that it is
imported from.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_sparse.attention import backends
from titan_sparse.attention.observe.statistics import Recording, recording
from titan_sparse.attention.patterns.vertical_slash.rows import set_probe_seed
from titan_sparse.config import Config, resolve_cp_intra, save, to_toml
from titan_sparse.config.changes import (
    ORIGIN_FILE,
    Origin,
    origin_text,
    read_saved,
    refuse_changes,
)
from titan_sparse.data import Batch
from titan_sparse.estimate.constants import costs_of_run
from titan_sparse.estimate.memory import Step, estimate, peak_phase
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.evaluation.validation import Validation
from titan_sparse.from_config import (
    backend_case,
    block_table,
    build_attends,
    build_context_parallel,
    build_layer_masks,
)
from titan_sparse.loss import count_valid
from titan_sparse.models.flavours import resolve
from titan_sparse.models.initialization import stable_seed
from titan_sparse.training.banner import Resolved, banner
from titan_sparse.training.build_model import build_model, check_float8
from titan_sparse.training.checkpoint import (
    Checkpointer,
    Progress,
    check_async_mode,
    check_lock,
    lock_run,
    unlock_run,
)
from titan_sparse.training.distributed import (
    barrier,
    build_meshes,
    choose_device,
    init_distributed,
    set_timeout,
)
from titan_sparse.training.guard import Guard, Recovery, decides_on_device, refuse_bad_weights
from titan_sparse.training.heartbeat import Watch
from titan_sparse.training.launcher import StopSignals, ignore_signals_in_children
from titan_sparse.training.metrics import MetricsLog
from titan_sparse.training.metrics_output import open_tracker
from titan_sparse.training.optimizer import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    resume_schedule,
)
from titan_sparse.training.run_folder import begin_start, profiler, step_done
from titan_sparse.training.setup import (
    alike,
    alike_in_files,
    base_digest,
    check_initial_weights,
    checkpoint_to_resume,
    find_adapters,
    local_world_size,
    open_data,
    read_initial_hf,
    recomputed_share,
    report_changes,
    source_of_weights,
    step_path,
    step_size,
)

logger = logging.getLogger("titan_sparse")

_STEPS_APART = 1_000_003
"""Steps after which a run would look at the rows of a run with the next training.seed."""


class Trainer:
    """A training run. The config has passed config.check().

    Raises ValueError, naming the key, for data, tokenizers and checkpoints that cannot be used.
    """

    def __init__(self, config: Config):
        self.config = config
        training = config.training

        # First whatever may be refused, before any process group exists.
        self.device = choose_device(training.device)
        check_async_mode(config.checkpoint, self.device)
        self.dtype = getattr(torch, training.dtype)
        self.model_config = resolve(**dataclasses.asdict(config.model))
        self.adapters = find_adapters(config, self.model_config)
        if config.float8.enable:
            check_float8(self.device)
        check_initial_weights(config, self.model_config)
        self.loader = open_data(config, self.model_config)
        self.origin = Origin(
            self.model_config,
            self.loader.tokenizer.digest,
            self.device.type,
            base_digest(config),
            self.loader.mixture.fingerprint(),
        )
        saved = read_saved(checkpoint_to_resume(config))
        if saved is not None:
            refuse_changes(saved, config, self.origin)
        self.validation = Validation(config, self.loader.tokenizer)
        # A backend may be refused for it.
        if training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        case = backend_case(
            config.attention, self.device.type, self.dtype, self.model_config.head_dim
        )
        self.backend = backends.choose(**case)
        self.kernel = backends.explain(**case)
        costs = costs_of_run(config, self.model_config)

        if os.environ.get("RANK", "0") == "0":
            lock_run(training.output_dir)
        tracker = open_tracker(config)
        torch.manual_seed(training.seed)

        # Who works together, and on the same.
        init_distributed(
            self.device,
            config.parallelism.first_step_timeout_seconds,
            alike(config)
            | {"the chosen attention.backend": self.backend}
            | alike_in_files(config, self.origin)
            | {"the digest of documents of data.source": self.loader.content_digest()}
            | {"the digest of validation.source": self.validation.content_digest()},
        )
        self.start_folder = begin_start(config, self.device)
        cp_intra = resolve_cp_intra(config.parallelism, local_world_size())
        self.meshes = build_meshes(config.parallelism, cp_intra, self.device.type)
        self.cp = build_context_parallel(config.attention, self.meshes.cp, costs)
        table_of_batch = None
        if self.cp.depends_on_mask:
            table_of_batch = functools.partial(block_table, config.attention, self.cp)
        self.loader.use_layout(self.cp.shard, table_of_batch)

        # What is trained.
        self.recomputed = recomputed_share(config, self._step_size, self.device)
        attends = build_attends(config.attention, self.cp, self.recomputed)
        self.model = build_model(config, self.model_config, attends, self.meshes.fsdp, self.device)
        self.optimizers = build_optimizer(self.model, config.optimizer, self.device.type)
        self.schedule = build_schedule(self.optimizers, config.lr_scheduler, training.steps)

        # What is kept and told of it.
        self.progress = Progress(self.device)
        self.guard = Guard(
            config.guard, self.device, decides_on_device(self.optimizers, self.device)
        )
        self.checkpointer = Checkpointer(
            config.checkpoint,
            training.output_dir,
            self.model,
            self.optimizers,
            self.loader,
            self.progress,
            states={"guard": self.guard},
            texts={"config.toml": to_toml(config), ORIGIN_FILE: origin_text(self.origin)},
        )
        self.recovery = Recovery(
            config,
            self.guard,
            self.checkpointer,
            self.model,
            self.optimizers,
            self.schedule,
            self.progress,
        )
        writes = dist.get_rank() == 0
        self.metrics = MetricsLog(config, self.model_config, self.device, writes, tracker)
        self.scorer = Scorer(
            self.model,
            self.model_config,
            config,
            self.cp,
            self.device,
            self.loader.tokenizer,
            self.meshes.dp_rank,
            self.meshes.dp_size,
        )
        self.signals = StopSignals()
        self.watch = Watch(
            config.parallelism.first_step_timeout_seconds,
            self.signals,
            self.start_folder,
        )
        # Seconds of the last step: what a stop in mid-step has to reckon with.
        self.step_seconds = 0.0
        # The step whose state is on disk.
        self.saved_step = 0
        # Groups made after the world's have torch's own timeout so far, 10 minutes for NCCL.
        self._set_timeout(config.parallelism.first_step_timeout_seconds)

    def train(self) -> None:
        """Train from the newest checkpoint to training.steps.

        SIGINT or SIGTERM ends the run earlier, after the last step that is finished within
        training.stop_grace_seconds. Its state is saved.
        """
        self._announce()
        with self.signals, self.watch:
            self._load()
            self.saved_step = self.progress.step
            stopped = self._run_steps()
            self.checkpointer.close()
            if self.config.checkpoint.last_save_in_hf and not stopped:
                self._save_in_hf()
        self.metrics.close()
        unlock_run(self.config.training.output_dir)
        if stopped:
            logger.info("stopped by a signal after step %d", self.progress.step)
        else:
            logger.info("finished %d steps", self.progress.step)

    def _load(self) -> None:
        """Resume from the run's newest checkpoint, else read model.initial_hf where that is given."""
        initial_hf = self.config.model.initial_hf
        # A checkpoint does not hold frozen weights.
        if self.adapters:
            read_initial_hf(self.config, self.model, self.model_config)
        if self.checkpointer.load():
            instead = ""
            if initial_hf and not self.adapters:
                instead = (
                    f", from the run's own checkpoint and not from model.initial_hf = {initial_hf}"
                )
            logger.info("resumed at step %d%s", self.progress.step, instead)
            self._take_up_settings()
        elif not self.adapters:
            read_initial_hf(self.config, self.model, self.model_config)
        self.checkpointer.check_disk(self.config.training.steps)
        refuse_bad_weights(
            self.model, source_of_weights(self.config, self.progress.step), self.device
        )

    def _take_up_settings(self) -> None:
        """What the user writes counts, and not what the checkpoint was saved with."""
        step = self.progress.step
        # Not always the one looked at first, which may have been damaged.
        saved = read_saved(step_path(self.config, step))
        if saved is not None:
            refuse_changes(saved, self.config, self.origin)
        resume_schedule(self.optimizers, self.schedule, self.config.optimizer, step)
        if saved is not None and dist.get_rank() == 0:
            report_changes(saved, self.config, step)

    def _run_steps(self) -> bool:
        """All steps that are left. Returns whether a signal ended them."""
        training = self.config.training
        gc.disable()  # collected at the same steps on all ranks, so that none makes the others wait
        first_step = self.progress.step + 1
        stopped = False
        with profiler(self.config.profiling, training.output_dir, dist.get_rank()) as profile:
            while self.progress.step < training.steps and not stopped:
                self.watch.step = self.progress.step + 1
                stopped = self.step()
                # A step that was left out leaves the one before it as the last.
                is_first = self.progress.step == first_step and not stopped
                self._after_step(stopped, is_first)
                step_done(profile, self.config.profiling, self.progress.step)
        gc.enable()
        return stopped or self._any_rank(self.signals.asked)

    def step(self) -> bool:
        """One optimizer step. Returns whether it was left out, as a rank was asked to stop."""
        began = time.monotonic()
        before = self.loader.state_dict(), self.progress.state_dict()
        accumulated = self.config.training.gradient_accumulation_steps
        batches = [next(self.loader) for _ in range(accumulated)]
        valid, tokens, asked = self._totals(batches)
        if asked:
            return self._leave_step_out(*before)
        step = self.progress.step + 1
        is_logged = self.metrics.should_log(step)
        draw_probe_rows(self.config.training.seed, step)
        draw_dropout(self.config, step)

        # Gradients add up over the micro-batches. Attention is recorded in the last one, what caps
        # cut is counted in all.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches):
            if number > 0 and self._lacks_time(began, number, accumulated):
                return self._leave_step_out(*before)
            is_recorded = is_logged and number == accumulated - 1
            with self.metrics.caps.counting(), self._recording(step, is_recorded) as recorded:
                loss += self._forward_backward(batch, valid)

        with torch.profiler.record_function("Optimizer.update"):
            grad_norm = self._clip()
            learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
            self.checkpointer.before_update()
            self.guard.update(step, loss, grad_norm, self.optimizers)
            self.schedule.step()
            self.optimizers.zero_grad()

        self.progress.step = step
        self.progress.tokens_seen += tokens
        self.metrics.count(tokens)
        self.recovery.read_guard(all_of_them=is_logged)
        if is_logged:
            dist.all_reduce(loss)
            values = {
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
                "lr": learning_rate,
                "skipped_updates": self.progress.skipped_updates,
            }
            lengths = batches[-1].lengths
            tokens_per_sequence = sum(sum(sequence) for sequence in lengths) / len(lengths)
            self.metrics.log(step, self.progress.tokens_seen, values, recorded, tokens_per_sequence)
        self.step_seconds = time.monotonic() - began
        return False

    def _lacks_time(self, began: float, done: int, accumulated: int) -> bool:
        """Whether the rest of the step and a save would outlast a rank's grace after a stop signal.
        Collective.

        began: the step, on the monotonic clock. done: micro-batches. Asks on the CPU, so that no
        GPU is waited for.
        """
        micro_batch_seconds = max(
            (time.monotonic() - began) / done, self.step_seconds / accumulated
        )
        grace = self.config.training.stop_grace_seconds
        needed = (accumulated - done) * micro_batch_seconds + self._save_seconds(grace)
        return self._any_rank(not self.signals.has_time_for(needed, grace))

    def _save_seconds(self, grace_seconds: float) -> float:
        """What a save takes until it is on disk, in the background too; half the grace if there was
        none yet."""
        if not self.config.checkpoint.enable:
            return 0.0
        last = self.checkpointer.last_save_seconds
        return grace_seconds / 2 if last is None else last

    def _any_rank(self, condition: bool) -> bool:
        """Whether it holds on any rank. Collective, on the CPU."""
        ranks = torch.tensor([int(condition)])
        dist.all_reduce(ranks)
        return ranks.item() > 0

    def _leave_step_out(self, loader: dict[str, Any], progress: dict[str, Any]) -> bool:
        """Back to these states, those before the step. Returns True."""
        self.optimizers.zero_grad()
        self.loader.load_state_dict(loader)
        self.progress.load_state_dict(progress)
        return True

    def _totals(self, batches: list[Batch]) -> tuple[int, int, bool]:
        """Over the world: labels that count, tokens consumed (each once), and whether any rank was
        asked to stop.

        On the CPU, so that no GPU is waited for.
        """
        labels = sum(int(count_valid(batch.labels)) for batch in batches)
        tokens = sum(sum(lengths) for batch in batches for lengths in batch.lengths)
        # All ranks of a context-parallel group see the same sequences: one counts their tokens.
        if self.cp.rank > 0:
            tokens = 0
        totals = torch.tensor([labels, tokens, self.signals.asked])
        dist.all_reduce(totals)
        labels, tokens, ranks_asked = totals.tolist()
        return max(labels, 1), tokens, ranks_asked > 0

    def _recording(self, step: int, is_logged: bool) -> AbstractContextManager[Recording | None]:
        """Records the attention of what runs inside, if the step is logged."""
        if not is_logged:
            return nullcontext()
        return recording(self.metrics.recall_rows(step), self.metrics.thumbnail_cells(step))

    def _forward_backward(self, batch: Batch, valid: int) -> Tensor:
        """This rank's share of the mean loss over `valid` labels, gradients left in the parameters."""
        training = self.config.training
        # [b, S_local]
        tokens = batch.tokens.to(self.device)
        labels = batch.labels.to(self.device)
        seq_len = tokens.shape[1] * self.cp.size
        masks = build_layer_masks(
            self.config.attention,
            self.model_config,
            batch.lengths,
            seq_len,
            self.cp,
            self.device,
            batch.table,
        )
        total = self.model(
            tokens,
            batch.positions.to(self.device),
            masks,
            labels,
            training.loss_chunk_tokens,
            training.z_loss,
        )
        loss = total / valid
        loss.backward()
        return loss.detach()

    def _clip(self) -> Tensor:
        """Scale gradients down to training.max_norm. Returns their norm before that."""
        return clip_gradients(self.model, self.config.training.max_norm)

    def _after_step(self, stopped: bool, is_first: bool) -> None:
        """What is due after a step: going back, saving, validation, collecting garbage."""
        step = self.progress.step
        training, parallelism = self.config.training, self.config.parallelism
        if dist.get_rank() == 0:
            check_lock(training.output_dir)
        is_last = stopped or step == training.steps
        is_due = self.checkpointer.is_due(step, is_last) and step != self.saved_step
        problem = self.recovery.problem(saves=is_due, is_last=is_last)
        if problem and not stopped:
            self._go_back(problem)
            return
        if problem and is_due:
            logger.error("step %d is not saved: %s", step, problem)
        saves = not problem and self.recovery.may_save(is_due, is_last)
        validates = self.validation.is_due(step) and not self._any_rank(self.signals.asked)
        if saves or validates:
            # Disks may be slow, and not alike. The first validation compiles what training has not.
            self._set_timeout(parallelism.first_step_timeout_seconds)
        self.checkpointer.raise_failure()
        if is_first:
            with ignore_signals_in_children():
                self.checkpointer.prepare()
        if saves:
            self.loader.check_unchanged()
            self.checkpointer.save(step)
            self.metrics.leave_out(self.checkpointer.last_held_seconds)
            self.saved_step = step
            self.recovery.has_saved()
        if validates:
            with without_dropout(self.model):
                self.validation.run(self.scorer, step, self.metrics, writes=dist.get_rank() == 0)
            self.metrics.start_interval()
        if saves or validates or is_first:
            barrier()
            self._set_timeout(parallelism.timeout_seconds)
        if step % training.gc_interval == 0:
            gc.collect(1)

    def _go_back(self, problem: str) -> None:
        """Go on from the last good checkpoint, with the batches that come next. Collective.

        Raises Poisoned if that is not possible.
        """
        self._set_timeout(self.config.parallelism.first_step_timeout_seconds)
        self.recovery.go_back(problem)
        self.saved_step = self.progress.step
        self.metrics.start_interval()
        barrier()
        self._set_timeout(self.config.parallelism.timeout_seconds)

    def _save_in_hf(self) -> None:
        # The other ranks wait for rank 0.
        self._set_timeout(self.config.parallelism.first_step_timeout_seconds)
        if dist.get_rank() == 0:
            initial_hf = self.config.model.initial_hf
            self.checkpointer.save_in_hf(
                self.progress.step, self.model_config, self.dtype, initial_hf, self.adapters
            )
        barrier()

    def _set_timeout(self, seconds: int) -> None:
        # Checkpoints are written in the background through many steps: that group keeps the long
        # timeout.
        is_short = seconds == self.config.parallelism.timeout_seconds
        set_timeout(seconds, without=self.checkpointer.background_groups() if is_short else [])
        self.watch.timeout_seconds = seconds

    def _announce(self) -> None:
        """Rank 0: the banner, and the resolved config in the run's folder."""
        if dist.get_rank() > 0:
            return
        step = self._step_size(self.recomputed)
        phases = estimate(step)
        resolved = Resolved(
            model=self.model_config,
            meshes=self.meshes,
            cp=self.cp,
            kernel=self.kernel,
            device=self.device,
            padded_seq_len=step.seq_len,
            memory=phases[peak_phase(phases)],
            recomputed=self.recomputed,
        )
        print(banner(self.config, resolved), flush=True)
        save(self.config, self.config.training.output_dir)

    def _step_size(self, recomputed: float) -> Step:
        """What a step's memory depends on, with this share of attention recomputed."""
        return step_size(self.config, self.model_config, self.backend, recomputed)


def draw_probe_rows(training_seed: int, step: int) -> None:
    """Choose the rows that probes look at in this step (vertical_slash.probe_rows = "spread").

    They are the same on all ranks, in the backward, and in a resumed run.
    """
    set_probe_seed((training_seed * _STEPS_APART + step) % 2**32)


def draw_dropout(config: Config, step: int) -> None:
    """Seed the dropout of adapters: the same in a resumed run, and different on each rank."""
    if config.lora.dropout:
        name = f"dropout of step {step} on rank {dist.get_rank()}"
        torch.manual_seed(stable_seed(config.training.seed, name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()
