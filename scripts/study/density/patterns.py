"""The patterns that are compared, each swept over one of its parameters: add yours here."""

from typing import Any, NamedTuple

from titan_sparse.attention.patterns import MoBA, Pattern, VerticalSlash, XAttention

RECALLS = (0.3, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98)
"""Asked of VerticalSlash. All rows have 0.9 and 0.95 between two of them."""


class Spec(NamedTuple):
    """A pattern of parameters `fixed`, with `knob` at each of `values`."""

    name: str
    kind: type[Pattern]
    fixed: dict[str, Any]
    knob: str = "recall"
    values: tuple[float, ...] = RECALLS

    def pattern(self, value: float) -> Pattern:
        """At one value of its knob."""
        return self.kind(**self.fixed, **{self.knob: value})


_COUNTED: dict[str, Any] = {"count_sinks": True}
_PUBLISHED = {"sinks": 30, "local_diagonals": 2, "probe_rows": "last"} | _COUNTED
_SPARE: dict[str, Any] = {"sinks": 4, "local_diagonals": 1}
"""Almost nothing is on unless the probe says so."""
_JOINT = {"budget": "joint"} | _PUBLISHED
_LAYER = {"budget": "layer", "probe_rows": "spread"} | _SPARE | _COUNTED
_THRESHOLDS = (0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 0.995)

SPECS = (
    Spec("layer", VerticalSlash, _LAYER),
    Spec("layer, probe 256", VerticalSlash, _LAYER | {"probe": 256}),
    Spec("layer, probe 512", VerticalSlash, _LAYER | {"probe": 512}),
    Spec("layer, last rows", VerticalSlash, _LAYER | {"probe_rows": "last"}),
    Spec("layer, local 2", VerticalSlash, _LAYER | {"local_diagonals": 2}),
    Spec("layer, sinks 30, local 2", VerticalSlash, _LAYER | {"sinks": 30, "local_diagonals": 2}),
    Spec("joint, spread, sinks 4, local 1", VerticalSlash, _LAYER | {"budget": "joint"}),
    Spec(
        "joint, spread, sinks 4, local 2",
        VerticalSlash,
        _LAYER | {"budget": "joint", "local_diagonals": 2},
    ),
    Spec(
        "joint, behind sinks, local 2",
        VerticalSlash,
        _LAYER | {"budget": "joint", "local_diagonals": 2, "count_sinks": False},
    ),
    Spec(
        "joint, behind sinks, both",
        VerticalSlash,
        {"budget": "joint", "probe_rows": "both", "sinks": 4, "local_diagonals": 2}
        | {"count_sinks": False},
    ),
    Spec("independent", VerticalSlash, {"budget": "independent"} | _PUBLISHED),
    Spec("joint", VerticalSlash, _JOINT),
    Spec("joint, sinks 4, local 1", VerticalSlash, _JOINT | _SPARE),
    Spec("joint, probe 64", VerticalSlash, _JOINT | {"probe": 64}),
    Spec("joint, probe 256", VerticalSlash, _JOINT | {"probe": 256}),
    Spec("xattention, stride 16", XAttention, {"stride": 16}, "threshold", _THRESHOLDS),
    Spec("xattention, stride 8", XAttention, {"stride": 8}, "threshold", _THRESHOLDS),
    Spec("moba, chunk 128", MoBA, {"chunk_size": 128}, "top_k", (2, 4, 8, 16, 32, 64, 96)),
    Spec("moba, chunk 512", MoBA, {"chunk_size": 512}, "top_k", (2, 3, 4, 6, 8, 16, 24)),
)
