"""From the [attention] section of a configuration to a pattern."""

import dataclasses
from typing import TYPE_CHECKING

from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

if TYPE_CHECKING:
    from titan_sparse.config import Attention


def build_pattern(attention: "Attention") -> Pattern:
    """The pattern that the section names, with its sub-table's parameters.

    vertical_slash.index = "xattention" is MTraining's variant with XAttention's index (its section 5): blocks instead of
    verticals and diagonals, chosen by the parameters of [attention.xattention].
    """
    if attention.pattern == "dense":
        return Dense()
    if attention.pattern == "moba":
        return MoBA(**dataclasses.asdict(attention.moba))
    parameters = dataclasses.asdict(attention.vertical_slash)
    if attention.pattern == "xattention" or parameters.pop("index") == "xattention":
        return XAttention(**dataclasses.asdict(attention.xattention))
    return VerticalSlash(**parameters)
