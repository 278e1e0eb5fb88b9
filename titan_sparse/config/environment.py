"""The environment in which torchrun starts a process: who is in the world, and whether it can begin."""

import os
import re

from titan_sparse.config.reading import require, show
from titan_sparse.config.sections import Flags, Parallelism

RANKS_PER_NODE = 8
"""Ranks of a node where torchrun does not say."""

_LAUNCH = (
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets for each process beside RANK, and a process group is made from."""


def world_from_environment() -> tuple[int, int]:
    """(ranks in all, ranks of this node) as torchrun sets WORLD_SIZE and LOCAL_WORLD_SIZE; 1 where
    unset.

    Raises ConfigError for other words than positive integers.
    """
    return _number("WORLD_SIZE", 1, least=1), _number("LOCAL_WORLD_SIZE", 1, least=1)


def world_of(
    flags: Flags, parallelism: Parallelism, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """(ranks in all, ranks of a node): torchrun's, unless --ranks says how many.

    Where nothing is started, and torchrun has not started this either, they are as many as the
    configuration needs at least.
    """
    ranks = flags.ranks
    if not ranks and flags.starts_nothing and world_size == 1:
        ranks = parallelism.dp_replicate * max(parallelism.dp_shard, 1) * parallelism.cp
    if not ranks:
        return world_size, local_world_size
    ranks_per_node = local_world_size if local_world_size > 1 else RANKS_PER_NODE
    return ranks, min(ranks, ranks_per_node)


def check_launch() -> None:
    """Refuses an environment in which this process would train alone, or on another's data, though
    it was meant as one of several.

    Either torchrun has set all of its variables, or none of them names a world of several ranks.
    Raises ConfigError.
    """
    world_size, local_world_size = world_from_environment()
    require(
        local_world_size <= world_size,
        f"environment: LOCAL_WORLD_SIZE = {local_world_size} is above WORLD_SIZE = {world_size}; "
        "start with torchrun or unset both",
    )
    if "RANK" not in os.environ:
        require(
            world_size == 1,
            f"environment: WORLD_SIZE = {world_size} without RANK; start with torchrun, or unset "
            "WORLD_SIZE to train in one process",
        )
        return
    for name in _LAUNCH:
        require(
            os.environ.get(name, "") != "",
            f"environment: RANK = {show(os.environ['RANK'])} without {name}; start with torchrun, "
            "or unset RANK to train in one process",
        )
    for name, size_name, size in (
        ("RANK", "WORLD_SIZE", world_size),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_world_size),
    ):
        number = _number(name, 0, least=0)
        require(
            number < size,
            f"environment: {name} = {number} is not below {size_name} = {size}; start with "
            "torchrun or unset them",
        )
    port = _number("MASTER_PORT", 1, least=1)
    require(port < 2**16, f"environment: MASTER_PORT = {port} is no port; write 1 to 65535")


def _number(name: str, default: int, least: int) -> int:
    """The variable as an integer of `least` or more; the default where it is unset."""
    text = os.environ.get(name)
    if text is None:
        return default
    kind = "a positive integer" if least else "0 or a positive integer"
    require(
        re.fullmatch("[0-9]{1,9}", text) is not None and int(text) >= least,
        f"environment: {name} = {show(text)} is not {kind}; start with torchrun or unset it",
    )
    return int(text)
