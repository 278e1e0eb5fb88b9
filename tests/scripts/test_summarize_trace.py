"""What the work of a trace was for, and what share of a step it took."""

import json

import pytest
import torch.distributed as dist

from scripts import summarize_trace
from scripts.summarize_trace import PARTS, part_of, summary, work_of
from tests.distributed import on_ranks
from tests.refusals import refused
from tests.runs import tiny_config, train

MAIN, AUTOGRAD, STREAM, OTHER_STREAM = 1, 2, 7, 20


class Trace:
    """Events of a step, in ms: ops and ranges of a CPU thread, and kernels launched inside them."""

    def __init__(self):
        self.events: list[dict] = []
        self.launches = 0

    def add(self, name: str, start: float, end: float, cat: str, tid: int, **args) -> None:
        event = {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "args": args}
        self.events.append(event | {"ts": 1e3 * start, "dur": 1e3 * (end - start)})

    def inside(self, *names: str, start: float, end: float = 0, tid: int = MAIN) -> None:
        """CPU frames, each around the next, of 1 ms unless `end` is given."""
        for depth, name in enumerate(names):
            cat = "cpu_op" if "::" in name and not name.startswith("FSDP") else "user_annotation"
            last = (end or start + 1) - 0.001 * depth
            self.add(name, start + 0.001 * depth, last, cat, tid)

    def launch(
        self, kernel: str, at: float, start: float, end: float, tid=MAIN, by="cuda_runtime"
    ) -> None:
        self.launches += 1
        stream = OTHER_STREAM if "nccl" in kernel else STREAM
        kinds = {"Memset": "gpu_memset", "Memcpy": "gpu_memcpy"}
        self.add("cudaLaunchKernel", at, at + 0.002, by, tid, correlation=self.launches)
        cat = kinds.get(kernel.split()[0], "kernel")
        self.add(kernel, start, end, cat, stream, correlation=self.launches)


def a_step() -> list[dict]:
    """A step whose kernels run 100 ms after their launches, so that times alone
    do not identify them."""
    trace = Trace()
    trace.inside("ProfilerStep#5", start=0, end=50)
    trace.inside("FSDP::pre_forward (layers.0)", "FSDP::all_gather (layers.0)", start=1)
    trace.launch("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 1.2, 100, 104)
    trace.inside("FSDP::pre_forward (layers.0)", "FSDP::all_gather_copy_out", start=2)
    trace.launch("void at::native::split_with_sizes_copy", 2.5, 104, 105)
    # A compiled block, as inductor calls it.
    trace.inside("Torch-Compiled Region: 0/0", "## Call CompiledFxGraph x ##", start=4, end=10)
    trace.launch("triton_red_fused_mean_0", 4.1, 105, 106, by="cuda_driver")
    trace.inside("aten::mm", start=4.2, end=4.4)
    trace.launch("nvjet_tst_128x256", 4.3, 106, 110)
    trace.inside("titan_sparse::select", start=5)
    trace.launch("triton_poi_fused_probe", 5.1, 110, 112, by="cuda_driver")
    trace.launch("ncclDevKernel_AllReduce_Sum_f32", 5.2, 112, 113)
    # Its own matmuls, copies and transfers are attention.
    trace.inside("titan_sparse::attend_forward", "aten::bmm", start=6, end=8)
    trace.launch("cutlass_flash_forward", 6.1, 113, 120)
    trace.launch("Memset (Device)", 6.2, 120, 121)
    trace.launch("ncclDevKernel_SendRecv", 6.3, 116, 123)
    trace.inside("_LinearCrossEntropy::", "aten::mm", start=11)
    trace.launch("nvjet_tst_64x64", 11.5, 123, 126)
    # The backward, in autograd's thread, while the main thread waits in a range of its own.
    trace.inside("Optimizer.is_not_here::", start=13)
    node = "GeneratedBackwardFor_titan_sparse_attend_forward_defaultBackward"
    evaluate = "autograd::engine::evaluate_function: "
    trace.inside(evaluate + node, node + "::", start=13, tid=AUTOGRAD)
    trace.launch("void contiguous_copy", 13.1, 126, 127, AUTOGRAD)
    trace.inside("titan_sparse::attend_backward", start=13.2, end=13.6, tid=AUTOGRAD)
    trace.launch("flash_backward", 13.3, 127, 137, AUTOGRAD)
    # FSDP's hook runs inside the node of the loss, and is not the loss.
    loss_node = evaluate + "_LinearCrossEntropyBackward"
    gather = "FSDP::all_gather (layers.0)"
    trace.inside(loss_node, "FSDP::pre_backward", gather, start=15, tid=AUTOGRAD)
    trace.launch("ncclDevKernel_Generic", 15.1, 137, 139, AUTOGRAD)
    post, reduce = "RegisterPostBackwardFunctionBackward::", "FSDP::post_backward_reduce (layers.0)"
    trace.inside(post, reduce, start=17, tid=AUTOGRAD)
    trace.launch("ncclDevKernel_ReduceScatter_Sum_f32", 17.1, 139, 144, AUTOGRAD)
    trace.inside("Optimizer.update", start=19)
    trace.launch("multi_tensor_apply_kernel", 19.1, 146, 148)
    trace.inside("aten::to", start=21)
    trace.launch("Memcpy HtoD (Pinned -> Device)", 21.5, 148, 149)
    trace.inside("c10d::allreduce_", start=23)
    trace.launch("ncclDevKernel_AllReduce_Sum_f64", 23.5, 149, 150)
    trace.add("nobody launched this", 150, 150.5, "kernel", STREAM, correlation=999)
    return trace.events


WANTED = {
    "attention, forward": 8,
    "attention, backward": 11,
    "selection": 2,
    "linear layers": 4,
    "norms, rope, elementwise": 1,
    "loss": 3,
    "optimizer": 2,
    "not attributed": 0.5,
    "FSDP copies": 1,
    "other copies": 1,
    "FSDP all-gather": 6,
    "FSDP reduce-scatter": 5,
    # 1 for the selection; of 7 the last 2 are beside nothing.
    "context-parallel transfers": 3,
    "other collectives": 1,
    "idle": 2,
}


def test_parts_of_a_step_by_hand():
    found = summary(a_step())
    assert found["steps"] == 1 and found["launches"] == 18
    assert found["span_ms"] == pytest.approx(50.5) == sum(WANTED.values())
    assert found["part_ms"] == pytest.approx(WANTED)
    # With what ran beside attention.
    assert found["ran_ms"]["context-parallel transfers"] == pytest.approx(8)
    assert found["launches_of_part"]["attention, forward"] == 2


def test_numbers_are_those_of_a_step():
    once = a_step()
    again = [event | {"ts": event["ts"] + 60e3} for event in once]
    for event in again:
        event["name"] = event["name"].replace("ProfilerStep#5", "ProfilerStep#6")
        if "correlation" in event["args"]:
            event["args"] = {"correlation": event["args"]["correlation"] + 1000}
    found = summary(once + again)
    assert found["steps"] == 2
    # Between the steps nothing runs for 9.5 ms.
    wanted = WANTED | {"idle": 2 + 9.5 / 2}
    assert found["part_ms"] == pytest.approx(wanted)
    assert found["span_ms"] == pytest.approx(sum(wanted.values()))
    assert found["kernels"][0] == {"name": "flash_backward", "calls": 1, "total_ms": 10}


@pytest.mark.parametrize("launch_thread", [None, 12345], ids=["no launch", "unknown thread"])
def test_an_op_stands_for_a_launch_that_cannot_be_placed(launch_thread):
    frame = {"name": "titan_sparse::attend_forward", "cat": "cpu_op", "ts": 0, "dur": 9, "tid": 1}
    op = {"name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 2, "tid": 1}
    op["args"] = {"External id": 5}
    kernel = {"name": "x", "cat": "kernel", "ts": 50, "dur": 2, "tid": 7}
    events = [frame, op, kernel | {"args": {"External id": 5, "correlation": 3}}]
    if launch_thread:
        launch = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 1.5, "dur": 0.1}
        events.append(launch | {"tid": launch_thread, "args": {"correlation": 3}})
    [work] = work_of(events)
    assert (work.around[-1], part_of(work)) == ("aten::mm", "attention, forward")


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("ncclDevKernel_SendRecv", "context-parallel transfers"),
        ("ncclDevKernel_AllGather_RING", "FSDP all-gather"),
        ("ncclDevKernel_ReduceScatter_Sum", "FSDP reduce-scatter"),
        ("ncclDevKernel_AllReduce_Sum", "other collectives"),
        ("sm90_xmma_gemm_bf16", "linear layers"),
        ("triton_tem_fused_mm_3", "linear layers"),
        ("triton_per_fused_1", "norms, rope, elementwise"),
        ("mystery", "not attributed"),
    ],
)
def test_names_of_kernels_tell_what_they_can(kernel, part):
    [work] = work_of([{"name": kernel, "cat": "kernel", "ts": 0, "dur": 2, "tid": 7}])
    assert part_of(work) == part


@on_ranks(2)
def test_runs_have_the_ranges_that_own_work(texts):
    """On a CPU, where no kernel is launched inside them."""
    config = tiny_config(
        texts,
        "run",
        training__steps=2,
        training__dtype="float32",
        training__seq_len=64,
        metrics__log_every=5,
        profiling__enable=True,
        profiling__first_step=2,
        profiling__steps=1,
        parallelism__cp=2,
        attention__schedule="ring",
        optimizer__name="AdamW",
    )
    train(config)
    dist.barrier()
    events = json.loads((texts / "run/profile/rank0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") in ("cpu_op", "user_annotation")}
    owners = {summarize_trace._owner((name,)) for name in names}
    assert owners == {*PARTS[:3], "loss", "optimizer", "FSDP", None}
    for owner in summarize_trace._OWNERS:
        # Neither learned sinks nor several tokens' losses.
        if not owner.endswith(("sinks_backward", "_TokenCrossEntropy")):
            assert any(name.startswith(owner) for name in names), owner


def test_script(tmp_path, capsys):
    def run(events: list[dict]) -> str:
        trace = tmp_path / "rank0.json"
        trace.write_text(json.dumps({"traceEvents": events}))
        summarize_trace.main([str(trace), "--top", "1"])
        return capsys.readouterr().out

    printed = run(a_step())
    assert "50.5 ms a step, 18 launches" in printed
    assert printed.endswith("10.0 ms      1.0 x  flash_backward\n")
    with pytest.raises(SystemExit, match="no work of a GPU.*profiling.enable = true"):
        run([])


@pytest.mark.parametrize("content", [None, "", '{"a": 1}\n{"a": 2}', "{}", "[]"])
def test_what_is_not_a_trace_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "rank0.json"
    if content is not None:
        path.write_text(content)
    with refused("rank0.json cannot be read as a trace .*profiling.enable", SystemExit):
        summarize_trace.main([str(path)])
