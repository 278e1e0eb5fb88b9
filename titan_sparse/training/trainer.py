"""The loop of a training run. build.py makes the parts that it works with."""

import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed.utils import clip_grad_norm_

from titan_sparse.attention.observe import recording
from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Config, save
from titan_sparse.config.changes import changes, read_saved, refuse_changes
from titan_sparse.data import Batch
from titan_sparse.estimate.memory import estimate, peak_phase
from titan_sparse.loss import count_valid
from titan_sparse.models.initialization import stable_seed
from titan_sparse.options.values import MOST
from titan_sparse.training import export, run_end
from titan_sparse.training.attention import build_layer_masks, sparse_from, why_dense
from titan_sparse.training.build import Parts, banner
from titan_sparse.training.checkpoint.folders import check_lock, unlock_run
from titan_sparse.training.faults.guard import all_finite, optimizer_states, refuse_bad_weights
from titan_sparse.training.faults.heartbeat import Watch
from titan_sparse.training.faults.launcher import Poisoned, StopSignals
from titan_sparse.training.faults.process_groups import barrier, set_timeout
from titan_sparse.training.optimizer import learning_rate
from titan_sparse.training.preflight import (
    read_initial_hf,
    step_path,
    step_size,
    warn_of_untrained_tokens,
)
from titan_sparse.training.run_folder import profiler
from titan_sparse.training.step_graphs import Computed, MicroBatch, StepGraphs

logger = logging.getLogger("titan_sparse")

_STEPS_APART = 1_000_003
"""Steps after which a run would look at the rows of a run with the next training.seed."""


class Trainer(Parts):
    """A training run. The config has passed config.check()."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.signals = StopSignals()
        self.watch = Watch(
            config.parallelism.first_step_timeout_seconds, self.signals, self.start_folder
        )
        # Tokens of the shortest document that can be sparse.
        self.sparse_from = sparse_from(config.attention)
        # Seconds of the last step: a stop in the middle of a step estimates the rest with it.
        self.step_seconds = 0.0
        # The step whose state is on disk.
        self.saved_step = 0
        # Bad steps up to now, without a good one between, as far as the host knows.
        self.bad_in_a_row = 0
        # A save was due in the middle of bad steps.
        self.save_is_late = False
        # The checkpoint that the run has gone back to, as long as it has saved none since.
        self.gone_back_to: int | None = None
        setting = config.compile.cuda_graphs if self.has_graphs else "off"
        self.graphs = StepGraphs(self.model, self.cp, setting)
        # Groups made after the world's have torch's own timeout so far, 10 minutes for NCCL.
        self._use_long_timeout()

    def train(self) -> None:
        """Train from the newest checkpoint to training.steps.

        SIGINT or SIGTERM ends the run earlier, after the last step that is finished within
        training.stop_grace_seconds. Its state is saved.
        """
        self._announce()
        with self.signals, self.watch, contextlib.closing(self.loader):
            self._load()
            self.saved_step = begins_after = self.progress.step
            stopped = self._run_steps()
            self.checkpointer.close()
            if self.config.checkpoint.last_save_in_hf and not stopped:
                self._save_in_hf()
        self.metrics.close()
        unlock_run(self.config.training.output_dir)
        if stopped:
            logger.info("stopped by a signal after step %d", self.progress.step)
        elif begins_after >= self.config.training.steps:
            logger.info(
                "the run had already finished (training.steps = %d), and its results are in %s. To train "
                "on, write more training.steps. To start anew, write another training.output_dir, or "
                "delete that folder",
                self.config.training.steps,
                self.config.training.output_dir,
            )
        else:
            logger.info("finished %d steps", self.progress.step)
            self._say_what_is_next()

    def _say_what_is_next(self) -> None:
        """After the last step: the picture of the loss, and the commands that come next."""
        if dist.get_rank() > 0:
            return
        if self.config.metrics.tensorboard:
            picture = run_end.draw_loss(self.config.training.output_dir)
            logger.info("wrote %s, a picture of the loss", picture)
        commands = run_end.next_commands(self.config)
        if commands:
            logger.info("\n  ".join(["what you can do next:", *commands]))

    def _load(self) -> None:
        """Resume from the run's newest checkpoint, else read model.initial_hf where that is given."""
        config = self.config
        # A checkpoint does not hold frozen weights.
        if self.adapters:
            read_initial_hf(config, self.model, self.model_config)
        if self.checkpointer.load():
            step = self.progress.step
            logger.info("resumed at step %d", step)
            # Not always the one looked at first, which may have been damaged.
            saved = read_saved(step_path(config, step))
            if saved is not None:
                refuse_changes(saved, config, self.origin)
                for change in changes(saved, config):
                    logger.info("changed since the checkpoint: %s", change)
        elif not self.adapters:
            read_initial_hf(config, self.model, self.model_config)
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
        return stopped or self._any_rank(self.signals.asked)

    def step(self) -> bool:
        """One optimizer step. Returns whether it was left out, as a rank was asked to stop."""
        began = time.monotonic()
        loader = self.loader.state_dict()
        accumulated = self.config.training.gradient_accumulation_steps
        batches = [next(self.loader) for _ in range(accumulated)]
        valid, tokens, sparse, asked = self._totals(batches)
        step = self.progress.step + 1
        if step < self.config.training.steps and not asked:
            self.loader.read_ahead(accumulated)
        if step == 1 and self.adapters:
            tokenizer = self.loader.tokenizer
            warn_of_untrained_tokens(self.config, self.adapters, tokenizer, batches)
        is_logged = self.metrics.should_log(step)
        seed = probe_seed(self.config.training.seed, step)
        draw_dropout(self.config, step)

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
            rate = self._set_learning_rate()
            self.checkpointer.before_update()
            self.guard.update(step, loss, grad_norm, self.optimizer)
            self.graphs.clear_gradients()

        self.progress.step = step
        self.progress.tokens_seen += tokens
        self.metrics.count(tokens)
        self._read_guard(all_of_them=is_logged)
        if is_logged:
            dist.all_reduce(loss)
            values = {
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
                "lr": rate,
                "skipped_updates": self.progress.skipped_updates,
            }
            if self.config.attention.mask == "documents" and self.sparse_from < MOST:
                values["sparse_tokens"] = sparse / max(tokens, 1)
            if sparse == 0 and not self.metrics.has_logged:
                self._warn_of_dense(batches)
            lengths = batches[-1].lengths
            tokens_per_sequence = sum(sum(sequence) for sequence in lengths) / len(lengths)
            self.metrics.log(
                step, self.progress.tokens_seen, values, computed.recorded, tokens_per_sequence
            )
        self.step_seconds = time.monotonic() - began
        return False

    def _lacks_time(self, began: float, done: int, accumulated: int) -> bool:
        """Whether the rest of the step and a save would outlast a rank's grace after a stop signal.
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

    def _warn_of_dense(self, batches: list[Batch]) -> None:
        """Say why the first logged step was dense, if the banner has not. Collective."""
        documents = [n for batch in batches for lengths in batch.lengths for n in lengths]
        longest = torch.tensor(max(documents))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        config, model = self.config, self.model_config
        in_banner = why_dense(config, model, self.loader.longest_document())
        if dist.get_rank() == 0 and not in_banner:
            step = f"step {self.progress.step}"
            logger.warning(why_dense(config, model, longest.item(), step))

    def _on_device(self, batch: Batch, valid: int, seed: int) -> MicroBatch:
        """valid: labels of the step that count. seed: of the probe's rows."""
        device = self.device

        def moved(x: Tensor) -> Tensor:
            # From pinned memory, so that the host does not wait for the step before.
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        dtype = torch.promote_types(getattr(torch, self.config.training.dtype), torch.float32)
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

    def _set_learning_rate(self) -> float:
        """That of the next step, by the config and the steps done alone. Checkpoints do not hold it."""
        config = self.config
        steps, done = config.training.steps, self.progress.step
        rate = learning_rate(config.optimizer.lr, config.lr_scheduler, steps, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _clip(self) -> Tensor:
        # 0: no clipping.
        return clip_grad_norm_(self.model.parameters(), self.config.training.max_norm or math.inf)

    def _after_step(self, stopped: bool, is_first: bool) -> None:
        """What is due after a step: going back, saving, validation, collecting garbage."""
        step = self.progress.step
        training = self.config.training
        if dist.get_rank() == 0:
            check_lock(training.output_dir)
        is_last = stopped or step == training.steps
        is_due = self.checkpointer.is_due(step, is_last) and step != self.saved_step
        problem = self._problem(is_due or self.save_is_late, is_last)
        if problem and not stopped:
            self._go_back(problem)
            return
        if problem and is_due:
            logger.error("step %d is not saved: %s", step, problem)
        saves = not problem and (is_due or self.save_is_late)
        # A checkpoint in the middle of bad steps would be no place to go back to.
        self.save_is_late = saves and self.bad_in_a_row > 0 and not is_last
        saves = saves and not self.save_is_late
        validates = self.validation.is_due(step) and not self._any_rank(self.signals.asked)
        if saves or validates:
            # Disks may be slow, and not alike. The first validation compiles what training has not.
            self._use_long_timeout()
        self.checkpointer.raise_failure()
        if saves:
            self.loader.check_unchanged()
            self.metrics.leave_out(self.checkpointer.save(step))
            self.saved_step = step
            self.gone_back_to = None
        if validates:
            self._validate()
        if saves or validates or is_first:
            self._use_short_timeout()
        if step % training.gc_interval == 0:
            gc.collect(1)

    def _validate(self) -> None:
        step = self.progress.step
        with without_dropout(self.model):
            self.validation.run(self.scorer, step, self.metrics, writes=dist.get_rank() == 0)
        self.metrics.start_interval()

    def _read_guard(self, all_of_them: bool) -> None:
        """Log and count the updates that the guard has skipped. all_of_them: Guard.reports()."""
        for report in self.guard.reports(all_of_them):
            self.bad_in_a_row = report.in_a_row
            if report.skipped:
                self.progress.skipped_updates += 1
                logger.warning(
                    "step %d: update skipped, as %s (%d in a row, %d in this run)",
                    report.step,
                    report.reason(),
                    report.in_a_row,
                    self.progress.skipped_updates,
                )

    def _problem(self, saves: bool, is_last: bool) -> str:
        """Why the run cannot go on from here; empty if it can. Collective.

        saves: a checkpoint is due, which must hold nothing but finite numbers.
        """
        section = self.config.guard
        if not section.enable:
            return ""
        self._read_guard(all_of_them=saves or is_last)
        if self.bad_in_a_row >= section.max_skips_in_a_row:
            return f"{self.bad_in_a_row} updates in a row were skipped"
        if saves:
            tensors = [*self.model.parameters(), *optimizer_states(self.optimizer)]
            if not all_finite(tensors, self.device):
                return "weights or optimizer states are not finite"
        return ""

    def _go_back(self, problem: str) -> None:
        """Load the last good checkpoint, without its place in the data: the batches that led here
        are not seen again. Collective. Raises Poisoned if it cannot."""
        self._use_long_timeout()
        step, skipped = self.progress.step, self.progress.skipped_updates
        times, limit = self.progress.times_gone_back, self.config.guard.max_rollbacks
        metrics_file = os.path.join(self.config.training.output_dir, "metrics.jsonl")
        advice = f"look at loss and grad_norm in {metrics_file} before step {step}"
        if times >= limit:
            raise Poisoned(
                f"step {step}: {problem}, and the run has gone back {times} times "
                f"(guard.max_rollbacks = {limit}); {advice}"
            )
        # A checkpoint that did not help is not tried again: then it is the one before.
        first_bad = step - self.bad_in_a_row + 1
        before = first_bad if self.gone_back_to is None else self.gone_back_to
        good = self.checkpointer.go_back(before)
        if good is None:
            raise Poisoned(
                f"step {step}: {problem}, and there is no good checkpoint before step {before}; {advice}"
            )
        self.gone_back_to = self.saved_step = good
        self.save_is_late = False
        self.bad_in_a_row = 0
        self.progress.skipped_updates = skipped
        self.progress.times_gone_back = times + 1
        logger.warning(
            "step %d: %s; gone back to the checkpoint of step %d, on with the batches after step %d",
            step,
            problem,
            good,
            step,
        )
        self.metrics.start_interval()
        self._use_short_timeout()

    def _save_in_hf(self) -> None:
        # The other ranks wait for rank 0.
        self._use_long_timeout()
        step, output_dir = self.progress.step, self.config.training.output_dir
        folder = os.path.join(output_dir, "huggingface", f"step-{step}")
        if dist.get_rank() == 0 and not os.path.exists(folder):
            export.export(step_path(self.config, step), self.config, folder)
            logger.info("saved %s for transformers", folder)
        barrier()

    def _use_long_timeout(self) -> None:
        """Before what may take long, and not the same time on all ranks: compilation, disks."""
        seconds = self.config.parallelism.first_step_timeout_seconds
        set_timeout(seconds)
        self.watch.timeout_seconds = seconds

    def _use_short_timeout(self) -> None:
        """Once all ranks are here. Collective."""
        barrier()
        seconds = self.config.parallelism.timeout_seconds
        # Writing checkpoints in the background may take long.
        set_timeout(seconds, without=self.checkpointer.group)
        self.watch.timeout_seconds = seconds

    def _announce(self) -> None:
        if dist.get_rank() > 0:
            return
        step = step_size(self.config, self.model_config, self.backend, self.recomputed)
        phases = estimate(step)
        logger.info("%s", banner(self, step.seq_len, phases[peak_phase(phases)]))
        for line in self.loader.advice():
            logger.warning("%s", line)
        save(self.config, self.config.training.output_dir)


def probe_seed(training_seed: int, step: int) -> int:
    """From which probes draw their rows in this step, the same on all ranks and in a resumed run."""
    return (training_seed * _STEPS_APART + step) % 2**32


def draw_dropout(config: Config, step: int) -> None:
    """Seed the dropout of adapters: the same in a resumed run, and different on each rank."""
    if config.lora.dropout:
        name = f"dropout of step {step} on rank {dist.get_rank()}"
        torch.manual_seed(stable_seed(config.training.seed, name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop nothing within the block. Afterwards each module drops as before."""
    dropouts = [
        module for module in model.modules() if isinstance(module, nn.Dropout) and module.training
    ]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()
