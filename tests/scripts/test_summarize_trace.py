"""Shares of a traced step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.summarize_trace import summary

ROOT = Path(__file__).parents[2]


def _event(name: str, start: float, end: float, cat: str = "kernel") -> dict:
    return {"name": name, "cat": cat, "ts": 1e3 * start, "dur": 1e3 * (end - start)}


EVENTS = [
    _event("aten::mm", 0, 100, "cpu_op"),
    _event("void gemm<int>(float)", 0, 4),
    _event("gemm", 3, 6),
    _event("ncclDevKernel_AllGather", 5, 9),  # 3 of 4 ms in the open
    _event("ncclDevKernel_SendRecv", 8, 10),
    _event("Memcpy HtoD", 9.5, 11, "gpu_memcpy"),
    _event("softmax", 13, 14),
]


def test_shares_add_up_and_hidden_work_counts_nothing():
    found = summary(EVENTS, top=2)
    assert found["span_ms"] == pytest.approx(14) and found["launches"] == 6
    assert found["share_ms"] == pytest.approx(
        {"compute": 7, "send-receive": 2, "collective": 2, "copy": 1, "idle": 2}
    )
    assert found["kernels"][0] == {"name": "gemm", "calls": 2, "total_ms": pytest.approx(7)}
    assert len(found["kernels"]) == 2


def test_script(tmp_path):
    def run(events: list[dict], *words: str) -> subprocess.CompletedProcess:
        (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "scripts.summarize_trace",
                tmp_path / "rank0.json",
                "--json",
                tmp_path / "out.json",
                *words,
            ],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )

    result = run(EVENTS)
    assert result.returncode == 0 and "14.0 ms, 6 launches" in result.stdout, result.stderr
    assert json.loads((tmp_path / "out.json").read_text()) == summary(EVENTS)
    assert "norms, rope, elementwise" in result.stdout
    on_cpu = run(EVENTS[:1])
    assert on_cpu.returncode == 0 and "100.0 ms, 1 pieces of CPU ops" in on_cpu.stdout
    halved = run(EVENTS, "--steps", "2")
    assert "7.0 ms a step, 3 launches (mean of 2 steps)" in halved.stdout
    none = run(EVENTS, "--steps", "0")
    assert none.returncode == 1 and "--steps 0: write 1 or more" in none.stderr
    empty = run([])
    assert empty.returncode == 1
    assert "no work of a GPU, nor ops of a CPU; write profiling.enable = true" in empty.stderr
