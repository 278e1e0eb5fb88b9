"""The parts of a training run: parallelism, optimizer, checkpoints, metrics."""
