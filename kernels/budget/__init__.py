"""The smallest sets that hold a share of a mass: a radix selection, and its twin, which sorts.

smallest_sets(mass, segments, recall, most_mass) -> selected, capped
smallest_cuts(mass, segments, scale, recall, spare) -> Cut
"""

from titan_sparse.kernels.budget.kernel import Cut, smallest_cuts, smallest_sets
from titan_sparse.kernels.budget.naive import smallest_sets_naive
from titan_sparse.kernels.budget.segments import Segments

__all__ = ["Cut", "Segments", "smallest_cuts", "smallest_sets", "smallest_sets_naive"]
