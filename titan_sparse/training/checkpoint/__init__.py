"""Saving and resuming, over torch.distributed.checkpoint (DCP).

A checkpoint is a folder step-N: one or more files of tensors from every rank, .metadata (what DCP
reads them by), config.toml and checksums.sha256. It is written as step-N.incomplete beside, made
durable and renamed: a folder step-N is complete or absent. Tensors are resharded on loading: any
world size, any context-parallel degree.

checkpointer.py: what a run does. saver.py: the files of a save. reader.py: checking and reading.
folders.py: names, moving aside, rotation, and the lock of a run.
"""
