"""About how long each part of the study takes on an H200: for --list. Imports no torch."""

from scripts.study.runs import DENSE, START, Evaluation, evaluations, longest, parts, runs
from scripts.study.sizes import Size

_FORWARD = {"linear": 0.05, "dense": 0.4, "sparse": 0.13}
"""Seconds at 65,536 tokens: what grows with the length, and attention, which grows with its square
where it is dense. Measured: a dense step takes 1.7 s, a sparse one 0.6."""
_STEP_OF_FORWARD = 3.6
_TOKEN = 0.025
"""Of a generated token."""
_RUN = 15
"""To build a run, to compile kernels, and to save."""
_EVALUATION = 6
_NEW_TOKENS = 9
_LENGTH = 65536


def listing(size: Size) -> str:
    """Each part, with about the minutes that it takes, and all so far."""
    lines = [f"{'part':>4} {'name':<20} {'minutes':>8} {'in all':>8}"]
    total = 0.0
    for number, name in enumerate(parts(size)):
        if name == "text":
            lines.append(f"{number:>4} {name:<20} {'a CPU':>8}")
            continue
        spent = seconds(size, name) / 60
        total += spent
        lines.append(f"{number:>4} {name:<20} {spent:>8.1f} {total:>8.1f}")
    return "\n".join(lines)


def seconds(size: Size, name: str) -> float:
    """Of a part, START or a run."""
    found = 0.0
    if name != START:
        step = _STEP_OF_FORWARD * forward(size.text.context, runs(size)[name].method)
        found += size.steps * step + _RUN
        found += 60 if size.compile else 0
    for evaluation in evaluations(size)[name]:
        found += _evaluation_seconds(size, evaluation)
    return found


def forward(length: int, method: str) -> float:
    """Of a sequence, without its backward."""
    share = length / _LENGTH
    if method == DENSE:
        return _FORWARD["linear"] * share + _FORWARD["dense"] * share**2
    return (_FORWARD["linear"] + _FORWARD["sparse"]) * share


def _evaluation_seconds(size: Size, evaluation: Evaluation) -> float:
    most = longest(size, evaluation.mode)
    method = evaluation.mode if evaluation.mode != "as_published" else DENSE
    lengths = [length for length in size.asked.lengths if length <= most]
    all_lengths = sum(forward(length, method) for length in lengths)
    # Of each length: once forced and once generated; the tasks of RULER forced at least.
    needles = size.asked.depths * size.asked.needles
    tasks = len(size.asked.tasks) * size.asked.samples
    generated = needles + (tasks if size.generates_ruler else 0)
    forwards = (needles + tasks + generated) * all_lengths
    tokens = generated * len(lengths) * _NEW_TOKENS * _TOKEN
    windows = len(size.text.windows) * size.windows * forward(most, method)
    return _EVALUATION + forwards + tokens + windows
