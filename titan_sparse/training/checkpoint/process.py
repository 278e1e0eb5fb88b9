"""A process that writes saves, so that Python's lock is not taken from training.

It is started with the run and waits. It shares the memory of the copies (staging.py); what it is
sent for a save is small. It ends with the training process, however that ends.
"""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from titan_sparse.training.checkpoint.staging import Slot, Staging, views
from titan_sparse.training.checkpoint.writer import Save, publish_save, write_share

_PR_SET_PDEATHSIG = 1
_PROGRAM = f"import sys; from {__name__} import serve; serve(int(sys.argv[1]))"


@dataclass
class UseMemory:
    """Message: the copies lie there. The memory itself comes along as an open file."""

    slots: dict[MetadataIndex, Slot]
    size: int
    """bytes"""


@dataclass
class Write:
    """Message: write_share() with these arguments."""

    save: Save
    rank: int
    values: dict[MetadataIndex, bytes]
    threads: int


@dataclass
class Publish:
    """Message: publish_save() with these arguments. metadata: None for what came last time."""

    save: Save
    metadata: Metadata | None
    share_sums: list[str]


class WriterProcess:
    """The training process's end. Its calls wait for the answer, and raise what was raised there."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",  # it must take no memory of a GPU
        }
        command = [sys.executable, "-c", _PROGRAM, str(other.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
        other.close()
        self.socket = own
        self.connection = Connection(os.dup(own.fileno()))
        self.sent_metadata: Metadata | None = None

    def use_memory(self, staging: Staging) -> None:
        """Write from these copies from now on."""
        self._send(UseMemory(staging.slots, len(staging.memory)))
        socket.send_fds(self.socket, [b"\0"], [staging.descriptor])
        self._receive()

    def write_share(
        self, save: Save, rank: int, values: dict[MetadataIndex, bytes], threads: int
    ) -> str:
        """writer.write_share() of the copies."""
        self._send(Write(save, rank, values, threads))
        return self._receive()

    def publish_save(self, save: Save, metadata: Metadata, share_sums: list[str]) -> None:
        """writer.publish_save()."""
        is_new = metadata is not self.sent_metadata
        self._send(Publish(save, metadata if is_new else None, share_sums))
        self._receive()
        self.sent_metadata = metadata

    def close(self) -> None:
        """End it. A save that it is writing is finished first."""
        self.connection.close()
        self.socket.close()
        self.process.wait()

    def _send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            self._died()

    def _receive(self) -> str:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._died()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _died(self) -> None:
        status = self.process.wait()
        raise OSError(f"the process that writes checkpoints has died (status {status})")


def serve(file: int) -> None:
    """The other end: do what is asked for until the training process is gone."""
    # A stop signal is the training process's to answer, which may still want a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(os.dup(file))
    descriptors = socket.socket(fileno=file)
    copies = {}
    metadata = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        answer: object = ""
        try:
            match message:
                case UseMemory():
                    _, [memory], _, _ = socket.recv_fds(descriptors, 1, 1)
                    copies = views(mmap.mmap(memory, message.size), message.slots)
                case Write():
                    answer = write_share(
                        message.save, message.rank, copies, message.values, message.threads
                    )
                case Publish():
                    metadata = message.metadata or metadata
                    publish_save(message.save, metadata, message.share_sums)
        except OSError as error:
            answer = OSError(error.errno, error.strerror or str(error), error.filename)
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        connection.send(answer)
