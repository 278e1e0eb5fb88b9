"""A run over two hosts: the losses of one host, a resume, and a host that is lost and comes back."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.hosts import Host, can_make_hosts, two_hosts
from tests.faults.jobs import SETTINGS, metrics, run_job, words_of
from tests.runs import write_texts

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
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_hosts")
    write_texts(folder / "texts")
    return folder


def _words(folder: Path, name: str, **settings: object) -> list[str]:
    own = {"training.output_dir": folder / name, "data.source": folder / "texts"}
    return words_of(SETTINGS | OF_FOUR_RANKS | own | settings)


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
