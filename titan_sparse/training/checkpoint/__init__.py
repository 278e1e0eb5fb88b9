"""Saving and resuming, over torch.distributed.checkpoint (DCP).

A checkpoint is a folder step-N: one or more files of tensors from every rank, .metadata (what DCP
reads them by), config.toml and checksums.sha256. It is written as step-N.incomplete beside, made
durable and renamed: a folder step-N is complete or absent. Tensors are resharded on loading: any
world size, any context-parallel degree.

folders.py: names, moving aside, rotation. planning.py: who writes what. staging.py: copies that
training need not wait for. writer.py: the files of a save. process.py: the process that writes
them. reader.py: checking and reading. lock.py: one run per folder. disk.py: whether a save fits.
checkpointer.py puts them together.
"""

from titan_sparse.training.checkpoint.checkpointer import Checkpointer
from titan_sparse.training.checkpoint.folders import FOLDER, newest_checkpoint
from titan_sparse.training.checkpoint.lock import check_lock, lock_run, unlock_run
from titan_sparse.training.checkpoint.progress import Progress
from titan_sparse.training.checkpoint.reader import Broken, read_into, read_metadata, verify
from titan_sparse.training.checkpoint.saver import SaveError, check_async_mode

__all__ = [
    "FOLDER",
    "Broken",
    "Checkpointer",
    "Progress",
    "SaveError",
    "check_async_mode",
    "check_lock",
    "lock_run",
    "newest_checkpoint",
    "read_into",
    "read_metadata",
    "unlock_run",
    "verify",
]
