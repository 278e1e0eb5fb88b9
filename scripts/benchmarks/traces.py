"""What a Chrome trace says about streams: which intervals ran where, and what they were for."""

KINDS = ("compute", "send-receive", "collective", "copy")


def intervals(events: list[dict], on_gpu: bool) -> list[dict]:
    """What ran after harness.start_together(), in order of its start, the first at 0.

    events: of a Chrome trace. An interval is {"start_us", "duration_us", "stream", "kind" (one of
    KINDS), "name" (a short one)}. Without a GPU these are the operators of the CPU, by thread.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    ran = [event for event in events if event.get("cat") in wanted]
    ran.sort(key=lambda event: (event["ts"], -event["dur"]))
    # start_together() ends with the first collective.
    start = next(event for event in ran if kind(event) == "collective")
    ran = [event for event in ran if event["ts"] >= start["ts"] + start["dur"]]
    return [
        {
            "start_us": round(event["ts"] - ran[0]["ts"], 1),
            "duration_us": round(event["dur"], 1),
            "stream": event["tid"],
            "kind": kind(event),
            "name": short(event["name"]),
        }
        for event in ran
    ]


def kind(event: dict) -> str:
    """Which of KINDS an event is."""
    name = event["name"].lower()
    sends = ("sendrecv", "gloo:send", "gloo:recv", "c10d::send", "c10d::recv")
    if any(word in name for word in sends):
        return "send-receive"
    if any(word in name for word in ("nccl", "gloo:", "c10d::")):
        return "collective"
    if "memcpy" in event["cat"] or "memset" in event["cat"]:
        return "copy"
    return "compute"


def short(name: str) -> str:
    """A kernel's name without return type, templates and arguments, at most 40 characters."""
    without_type = name.removeprefix("void ")
    without_template = without_type.partition("<")[0]
    return without_template.partition("(")[0][:40]
