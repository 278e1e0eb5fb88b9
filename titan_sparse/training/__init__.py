"""The parts of a training run: parallelism, optimizer, checkpoints, metrics."""

from titan_sparse.options.extras import need_here

need_here("train")
