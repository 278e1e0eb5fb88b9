"""Plays the transfers and kernels of one attention layer through, on all ranks at once: seconds from integers and rates.

The order of events is that of attention/transport.py and gathered.py: a transfer is posted before the step that it hides
behind, begins when both its ends have posted it, and is waited for after the step. Transfers are taken not to slow each
other down or the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.routing import Hops

Links = tuple[Tensor, Tensor]
"""Seconds of one transfer from the previous rank of the inner and of the outer ring, float64 [W] each."""


class Timeline(NamedTuple):
    """compute: [W, steps] seconds of kernels and launches. waiting: [W, steps] seconds after each step in which nothing
    was left to compute: exposed communication. Both float64."""

    compute: Tensor
    waiting: Tensor

    def began(self) -> Tensor:
        """Seconds until each rank begins each step, [W, steps]."""
        each = self.compute + self.waiting
        return each.cumsum(-1) - each

    def finish(self) -> Tensor:
        """Seconds until each rank is done, [W]."""
        return (self.compute + self.waiting).sum(-1)

    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return self.finish().max().item()

    def exposed(self) -> float:
        """Largest exposed communication of a rank, in seconds."""
        return self.waiting.sum(-1).max().item()


class _Rings(NamedTuple):
    """The previous rank of each on the inner and on the outer ring, int64 [W]."""

    inner: Tensor
    outer: Tensor


def _rings(hops: Hops) -> _Rings:
    ranks, inter = hops.inner_to.shape
    intra, rank = ranks // inter, torch.arange(ranks)
    return _Rings(rank // intra * intra + (rank - 1) % intra, (rank - intra) % ranks)


def _sends(hops: Hops, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Does rank r send after step t, after window o, what belongs to the chunk that it computed on: bool [W, steps] and
    [W, inter]."""
    ranks, inter = hops.inner_to.shape
    window, step = torch.arange(ranks) // (ranks // inter), torch.arange(ranks) % (ranks // inter)
    inner = (hops.inner_from[sources, window] <= step) & (step < hops.inner_to[sources, window])
    source, window = sources[:, :: ranks // inter], torch.arange(inter)
    return inner, (hops.outer_from[source] <= window) & (window < hops.outer_to[source])


def _arrival(posted: Tensor, previous: Tensor, seconds: Tensor, sent: Tensor) -> Tensor:
    """When each rank holds what the previous one sends; -inf where that sends nothing."""
    began = torch.maximum(posted, posted[previous])
    return torch.where(sent[previous], began + seconds, -torch.inf)


def ring_forward(compute: Tensor, hops: Hops, sources: Tensor, links: Links) -> Timeline:
    """A ring or double ring's forward. compute: float64 [W, steps] seconds; sources: of balance.step_sources()."""
    rings, (inner, outer) = _rings(hops), _sends(hops, sources)
    steps = compute.shape[1] // outer.shape[1]
    now, waiting = torch.zeros(len(compute), dtype=torch.float64), torch.zeros_like(compute)
    for step in range(compute.shape[1]):
        if step % steps == 0:
            next_node = _arrival(now, rings.outer, links[1], outer[:, step // steps])
        ends = (step + 1) % steps == 0
        arrives = next_node if ends else _arrival(now, rings.inner, links[0], inner[:, step])
        computed = now + compute[:, step]
        now = torch.maximum(computed, arrives)
        waiting[:, step] = now - computed
    return Timeline(compute, waiting)


def ring_backward(compute: Tensor, hops: Hops, gradients: Hops, sources: Tensor, links: Links,
                  gradient_links: Links) -> Timeline:
    """A ring or double ring's backward. Gradients follow one step behind their chunks; the sum of a node is complete, and
    goes on to the next node, after the first step of the next window. An upper bound for double rings: transport.py leaves
    the first window's rest to the end, for the last outer gradient to hide behind."""
    rings, (inner, outer), (inner_back, outer_back) = _rings(hops), _sends(hops, sources), _sends(gradients, sources)
    steps, windows = compute.shape[1] // outer.shape[1], outer.shape[1]
    now, waiting = torch.zeros(len(compute), dtype=torch.float64), torch.zeros_like(compute)
    gradient = node = torch.full_like(now, -torch.inf)
    for step in range(compute.shape[1]):
        window, first, ends = step // steps, step % steps == 0, (step + 1) % steps == 0
        if first:
            next_node = _arrival(now, rings.outer, links[1], outer[:, window])
        arrives = next_node if ends else _arrival(now, rings.inner, links[0], inner[:, step])
        computed = now + compute[:, step]
        now = torch.maximum(computed, gradient)
        if first and window:
            now = torch.maximum(now, node)
            node = _arrival(now, rings.outer, gradient_links[1], outer_back[:, window - 1])
        gradient = _arrival(now, rings.inner, gradient_links[0], inner_back[:, step])
        now = torch.maximum(now, arrives)
        if step + 1 == compute.shape[1]:
            now = torch.maximum(torch.maximum(now, gradient), node)
            now = torch.maximum(now, _arrival(now, rings.outer, gradient_links[1], outer_back[:, windows - 1]))
        waiting[:, step] = now - computed
    return Timeline(compute, waiting)


def gather_forward(compute: Tensor, gather: float) -> Timeline:
    """all_gather's forward. compute: [W, KV heads] seconds; gather: of one KV head, under the last one's computing."""
    now, waiting = torch.zeros(len(compute), dtype=torch.float64), torch.zeros_like(compute)
    arrives = gather
    for head in range(compute.shape[1]):
        began = now.clamp(min=arrives)
        arrives = max(now.max().item(), arrives) + gather
        waiting[:, head] = began - now
        now = began + compute[:, head]
    return Timeline(compute, waiting)


def gather_backward(compute: Tensor, gather: float, scatter: float) -> Timeline:
    """As gather_forward(); `scatter` seconds bring the gradient of a KV head home, under the next one's computing."""
    timeline = gather_forward(compute, gather)
    ends = (timeline.compute + timeline.waiting).cumsum(1)
    home = 0.0
    for head in range(compute.shape[1]):
        home = max(home, ends[:, head].max().item()) + scatter
    timeline.waiting[:, -1] += home - ends[:, -1]
    return timeline


def with_columns(timeline: Timeline, seconds: float, begins: Tensor, needed: Tensor) -> Timeline:
    """The same with an exchange of columns beside it, from `begins` until it is waited for at `needed`, [W] seconds."""
    late = (begins.max() + seconds - needed).clamp(min=0)
    waiting = timeline.waiting.clone()
    waiting[:, -1] += late
    return Timeline(timeline.compute, waiting)
