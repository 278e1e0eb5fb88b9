"""Two hosts on one machine: namespaces with a name, processes, and a network of their own.

The hosts share a disk and a link with addresses of the block reserved for documentation. Nothing
outside the namespaces is changed, but for /etc/netns, from where `ip` reads the names of hosts.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.jobs import ROOT

ADDRESSES = {"node-a": "192.0.2.1", "node-b": "192.0.2.2"}

PAST_TORCHRUN = ROOT / "scripts/past_torchrun.sh"


def can_make_hosts() -> bool:
    """Whether this process may make namespaces, and has the programs for that."""
    kinds = ["--uts", "--net", "--pid", "--mount", "--fork"]
    programs = shutil.which("ip") and shutil.which("unshare")
    return bool(programs) and not subprocess.run(["unshare", *kinds, "true"]).returncode


@dataclass
class Host:
    name: str
    jobs: list[subprocess.Popen] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"titan-{os.getpid()}-{self.name}"

    def start(
        self, log: Path, *words: object, endpoint: str = "node-a", **environment: str
    ) -> subprocess.Popen:
        """train.py with two ranks of four, by the launcher of a job over two hosts.

        words: options of train.py. log: the file to which this start's output is added.
        """
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", "2", "--nproc-per-node", "2"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{endpoint}:29400"]
        command = [PAST_TORCHRUN, *torchrun, "--rdzv-id", "job", ROOT / "train.py", *words]
        with open(log, "a") as output:
            job = subprocess.Popen(
                [*self._inside(), *map(str, command)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.jobs.append(job)
        return job

    def kill(self) -> None:
        """kill -9 of all processes of this host."""
        for job in self.jobs:
            # The first process of the namespace dies with it, and with that one all others.
            job.kill()
            job.wait()
        self.jobs.clear()

    def _inside(self) -> list[str]:
        new = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        name = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *new, *name]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, without processes. They are removed afterwards."""
    first, second = hosts = Host("node-a"), Host("node-b")
    folders = [Path("/etc/netns", host.namespace) for host in hosts]
    known = {"localhost": "127.0.0.1"} | ADDRESSES
    lines = [f"{address} {name}\n" for name, address in known.items()]
    try:
        for host, folder in zip(hosts, folders, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("".join(lines))
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        link = ["link", "add", "eth0", "netns", first.namespace, "type", "veth"]
        _ip(*link, "peer", "name", "eth0", "netns", second.namespace)
        for host in hosts:
            address = f"{ADDRESSES[host.name]}/24"
            _ip("-n", host.namespace, "address", "add", address, "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace])
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may have some there
            folders[0].parent.rmdir()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
