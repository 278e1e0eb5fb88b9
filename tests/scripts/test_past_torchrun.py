"""scripts/past_torchrun.sh: signals reach the ranks and not torchrun, whose status is the script's."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/past_torchrun.sh"

# Starts a rank that ends well when it is signaled; ends with its status, and badly if signaled itself.
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


def test_the_status_is_that_of_the_command():
    assert subprocess.run([SCRIPT, "false"]).returncode == 1
    assert subprocess.run([SCRIPT, "true"]).returncode == 0
