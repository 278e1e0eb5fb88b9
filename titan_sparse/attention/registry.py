"""Pass objects by a key to custom ops, which take only tensors and strings.

Torch's own way, opaque types, is private in the versions that we support, and torch.compile wants
such an object rebuilt from text or as an input of every graph. Here a key is a constant of the graph.
The table holds weak references only: what it names lives as long as its owner, so that no process
group outlives the ContextParallel that made it.
"""

from typing import Any
from weakref import WeakValueDictionary

OBJECTS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Everything registered whose owner still lives, by key."""


def lookup(key: str) -> Any:
    """The object that was registered under this key.

    Raises RuntimeError if it is gone: a backward, or a compiled call, of a ContextParallel that
    no longer exists.
    """
    value = OBJECTS.get(key)
    if value is None:
        raise RuntimeError(
            f'"{key}" is gone: keep the ContextParallel until the last backward through it'
        )
    return value
