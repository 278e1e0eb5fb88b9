"""scripts/past_torchrun.sh: signals reach the ranks, and a torchrun that
failed is started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/past_torchrun.sh"

# Starts a rank that ends well when it is signaled; ends with its status, and
# badly if signaled itself.
TORCHRUN = """
import signal, subprocess, sys
rank = '''
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: (print("asked", flush=True), time.sleep(0.5), sys.exit(0)))
print("ready", flush=True)
time.sleep(60)
'''
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(9))
sys.exit(subprocess.run([sys.executable, "-c", rank]).returncode)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_ranks(number):
    process = subprocess.Popen(
        [SCRIPT, sys.executable, "-c", TORCHRUN],
        stdout=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert output == "asked\n" and process.returncode == 0


def _without_pause(folder: Path, seconds: str = "0.1") -> Path:
    """The script with a shorter pause."""
    text = SCRIPT.read_text()
    assert text.count("pause_seconds=5 ") == 1
    script = folder / "past_torchrun.sh"
    script.write_text(text.replace("pause_seconds=5 ", f"pause_seconds={seconds} "))
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    "command, restarts, status, starts",
    [
        ("exit 1", "3", 1, 4),
        ("(($(wc -l < starts) > 2)) || exit 1", "3", 0, 3),
        ("exit 0", "3", 0, 1),
        # torchrun does not understand its options, is missing, or was killed.
        ("exit 2", "3", 2, 1),
        ("exit 127", "3", 127, 1),
        ("kill -9 $$", "3", 137, 1),
        ('touch "$TITAN_SPARSE_ENDED"; exit 1', "3", 1, 1),
        # Nothing is started again by itself.
        ("exit 1", "", 1, 1),
        *[("exit 0", restarts, 2, 0) for restarts in ("-1", "many", "1.5")],
    ],
)
def test_only_a_failure_is_started_again_and_so_many_times(
    tmp_path, command, restarts, status, starts
):
    count = f"cd {tmp_path}; echo >> starts; echo $TITAN_SPARSE_RESTART_COUNT >> counts; {command}"
    done = subprocess.run(
        [_without_pause(tmp_path), "bash", "-c", count],
        env=os.environ | {"RESTARTS": restarts},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = tmp_path / "starts"
    assert done.returncode == status
    assert (len(lines.read_text()) if lines.exists() else 0) == starts
    counts = (tmp_path / "counts").read_text().split() if starts else []
    assert counts == [str(number) for number in range(starts)]
    assert done.stderr.count("starts again in") == max(starts - 1, 0)
    assert ("(1 of 3 restarts are left)" in done.stderr) == (starts == 4)
    assert (f"RESTARTS = {restarts} is not a number; write" in done.stderr) == (starts == 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["while it runs", "in the pause"])
def test_a_stopped_run_is_not_started_again(tmp_path, number, moment):
    command = "echo started; exit 1"
    if moment == "while it runs":
        command = "echo started; sleep 20; exit 1"
    process = subprocess.Popen(
        [_without_pause(tmp_path, "20"), "bash", "-c", command],
        env=os.environ | {"RESTARTS": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "started\n"
    if moment == "in the pause":
        assert "starts again in 20 s" in process.stdout.readline()
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "started" not in output
    assert time.monotonic() - began < 10


@pytest.mark.faults
@pytest.mark.parametrize(
    "words, printed",
    [
        (["--attention.patern", "dense"], "attention.pattern"),
        (["--data.source", "nowhere"], "data.source"),
    ],
)
def test_a_refused_run_is_not_started_again(tmp_path, words, printed):
    """torchrun itself ends with 1 in all of these cases."""
    settings = ["--training.output_dir", tmp_path / "run", "--training.device", "cpu"]
    command = torchrun(1, ROOT / "train.py", *settings, *words)
    environment = os.environ | {"RESTARTS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([SCRIPT, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and printed in done.stderr, done.stderr
    assert "starts again" not in done.stderr
