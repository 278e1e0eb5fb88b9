"""A run over two hosts: the losses of one host, a resume, and a host that is lost and comes back.

The hosts are on one machine: namespaces with a name, processes, and a network of their own. They
share a disk and a link with addresses of the block reserved for documentation. Nothing outside the
namespaces is changed, but for /etc/netns, from where `ip` reads the names of hosts.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.jobs import ROOT, SETTINGS, metrics, run_job
from tests.runs import write_texts
from titan_sparse.config.reading import as_words

ADDRESSES = {"node-a": "192.0.2.1", "node-b": "192.0.2.2"}


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

    def start(self, log: Path, *words: object, **environment: str) -> subprocess.Popen:
        """train.py with two ranks of four, by the launcher of a job over two hosts.

        words: options of train.py. log: the file to which this start's output is added.
        """
        command = [ROOT / "scripts/past_torchrun.sh", sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "job"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29400"]
        command += [ROOT / "train.py", *words]
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


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
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


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip, and unshare"),
]

STEPS = 14

OF_FOUR_RANKS = {
    "training.steps": STEPS,
    "training.dtype": "float64",
    "lr_scheduler.total_steps": STEPS,
    "attention.pattern": "vertical_slash",
    "attention.vertical_slash.recall": 0.6,
    "attention.vertical_slash.dense_below": 32,
    "parallelism.cp": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_hosts")
    write_texts(folder / "texts")
    return folder


def _words(folder: Path, name: str, **settings: object) -> list[str]:
    own = {"training.output_dir": folder / name, "data.source": folder / "texts"}
    return as_words(SETTINGS | OF_FOUR_RANKS | own | settings)


def _losses(run: Path) -> set[tuple[int, float]]:
    """Steps and their losses. A step that was repeated with another loss is there twice."""
    return {(line["step"], line["loss"]) for line in metrics(run)}


@pytest.fixture(scope="module")
def undisturbed(hosts: tuple[Host, Host], folder: Path) -> Path:
    """A run over both hosts that ends after 6 steps and is resumed. Its log is beside it."""
    for steps in (6, STEPS):
        words = _words(folder, "undisturbed", **{"training.steps": steps})
        jobs = [host.start(folder / f"undisturbed.{host.name}", *words) for host in hosts]
        assert [job.wait(300) for job in jobs] == [0, 0]
    return folder / "undisturbed"


def test_two_hosts_train_and_resume_as_one_does(undisturbed, folder):
    printed = (folder / "undisturbed.node-a").read_text()
    assert printed.count("2 cp_inter x 2 cp_intra") == printed.count("schedule double_ring") == 2
    assert "resumed at step 6" in printed
    for start in (undisturbed / "starts").glob("*/start.json"):
        ranks = json.loads(start.read_text())["ranks"]
        assert [rank["host"] for rank in ranks] == ["node-a", "node-a", "node-b", "node-b"]

    status, printed = run_job(_words(folder, "one_host"), folder / "one_host.log", ranks=4)
    assert status == 0 and "1 cp_inter x 4 cp_intra" in printed, printed
    wanted = {line["step"]: line["loss"] for line in metrics(folder / "one_host")}
    assert dict(_losses(undisturbed)) == pytest.approx(wanted, abs=1e-9)
    assert len(wanted) == STEPS


@pytest.mark.parametrize(
    "lost, line",
    [(0, "has lost the job's store on host node-a in step"), (1, "(host node-b, process")],
    ids=["with_rank_0", "without_rank_0"],
)
def test_a_lost_host_comes_back(hosts, folder, undisturbed, lost, line):
    """The other host's launcher starts again. Rank 0 and the rendezvous are on the first host."""
    name = f"lost_{lost}"
    words = _words(folder, name)
    logs = [folder / f"{name}.{host.name}" for host in hosts]
    jobs = [host.start(log, *words, RESTARTS="5") for host, log in zip(hosts, logs, strict=True)]
    try:
        while not any(line["step"] == 7 for line in metrics(folder / name)):
            assert [job.poll() for job in jobs] == [None, None]
            time.sleep(0.05)
        hosts[lost].kill()
        time.sleep(8)
        jobs[lost] = hosts[lost].start(logs[lost], *words, RESTARTS="5")
        assert [job.wait(240) for job in jobs] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    left = logs[1 - lost].read_text()
    assert line in left and "starts again in 5 s" in left
    resumed = re.findall(r"resumed at step (\d+)", logs[0].read_text())
    assert resumed and int(resumed[0]) >= 6
    assert _losses(folder / name) == _losses(undisturbed)
