"""Ends of a run that train.py knows: each has an exit status and one line, and no traceback.

Loads no torch, as launcher.py.
"""


class OtherRankFailed(RuntimeError):
    """A collective has failed on this rank, but another rank is dead or has failed before. Status 1."""


class Poisoned(RuntimeError):
    """The guard has given up: the run cannot go on by itself. The same on every rank. Status 3."""
