"""What a Chrome trace says about streams: which intervals ran where, and what they were for."""

MOST_INTERVALS = 2000
"""Kept of one trace: about 250 KB of JSON."""
KINDS = ("compute", "send-receive", "collective", "copy")
_SHORT_GAP_US = 5.0


def after_start(events: list[dict]) -> list[dict]:
    """What began after start_together(), which ends with the first collective."""
    collectives = [
        event
        for event in events
        if "dur" in event
        and event.get("cat") in ("kernel", "cpu_op")
        and kind(event) == "collective"
    ]
    start = min(collectives, key=lambda event: event["ts"])
    began = start["ts"] + start["dur"]
    return [event for event in events if event.get("ts", 0) >= began]


def intervals(events: list[dict], on_gpu: bool) -> list[dict]:
    """What ran, in order of its start, the first at 0.

    events: of a Chrome trace. An interval is {"start_us", "duration_us", "stream", "kind" (one of
    KINDS), "name" (a short one)}. Neighbors of one kind on one stream are merged over short gaps,
    and over longer ones until MOST_INTERVALS are left. Without a GPU these are the operators of the
    CPU, by thread.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    ran = []
    for event in events:
        if event.get("cat") in wanted:
            ran.append(
                {
                    "start_us": event["ts"],
                    "duration_us": event["dur"],
                    "stream": event["tid"],
                    "kind": kind(event),
                    "name": short(event["name"]),
                }
            )
    ran.sort(key=lambda interval: (interval["start_us"], -interval["duration_us"]))

    gap = _SHORT_GAP_US
    merged = _merge(ran, gap)
    while len(merged) > MOST_INTERVALS:
        gap *= 2
        merged = _merge(ran, gap)

    first = merged[0]["start_us"] if merged else 0
    for interval in merged:
        interval["start_us"] = round(interval["start_us"] - first, 1)
        interval["duration_us"] = round(interval["duration_us"], 1)
    return merged


def _merge(ran: list[dict], gap: float) -> list[dict]:
    """Neighbors become one interval, under the name of the longest of them; new dicts."""
    merged = []
    last: dict[object, dict] = {}  # the newest merged interval of each stream
    longest: dict[object, float] = {}  # and the duration of the one that it is named after
    for interval in ran:
        stream = interval["stream"]
        before = last.get(stream)
        joins = (
            before is not None
            and before["kind"] == interval["kind"]
            and interval["start_us"] <= before["start_us"] + before["duration_us"] + gap
        )
        if not joins:
            last[stream] = dict(interval)
            longest[stream] = interval["duration_us"]
            merged.append(last[stream])
            continue
        end = max(
            before["start_us"] + before["duration_us"],
            interval["start_us"] + interval["duration_us"],
        )
        before["duration_us"] = end - before["start_us"]
        if interval["duration_us"] > longest[stream]:
            before["name"] = interval["name"]
            longest[stream] = interval["duration_us"]
    return merged


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
