# What __init__.py loads at first use, for editors and type checkers, which cannot see through it.
from titan_sparse.attention import masks as masks
from titan_sparse.attention import patterns as patterns
from titan_sparse.attention.attend import attend as attend
from titan_sparse.attention.context_parallel.group import ContextParallel as ContextParallel
from titan_sparse.attention.observe import recording as recording

__version__: str
