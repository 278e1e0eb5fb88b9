"""Scores of verticals and slashes, and the thresholds at which a head reaches its recall.

first_scores(free, keys, lse) -> scores of verticals, masses of tiles, remaining shares, savings
slash_gains(tile_mass, remaining, savings, tile, rows) -> gains of slashes at each level
slash_scores(gains, cost, is_local) -> scores of slashes, and their bins
final_scores(free, keys, lse, first, of_slashes, offset) -> FinalScores
mass_histogram(final, keys, spans) -> masses and numbers of verticals by bin
slash_masses(tile_mass, tile) -> masses of slashes
add_slashes(mass, slash_mass, bins, span, offset) -> masses of both by bin, numbers of slashes
head_thresholds(mass, max_missed, verticals, slashes) -> Thresholds
select(candidates, vertical_threshold, slash_threshold) -> the verticals and slashes that reach them

The score of a candidate (a vertical or a slash) is its attention mass per pair of tokens in the
rows of a probe, over the time of a pair. README.md has the formulas. The twins in selection.naive
have the same names and signatures.
"""

from titan_sparse.kernels.selection import naive
from titan_sparse.kernels.selection.shared import (
    ALWAYS,
    BINS,
    BINS_PER_OCTAVE,
    LEVELS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    FinalScores,
    SpanTokens,
    bins_of,
)
from titan_sparse.kernels.selection.slashes import slash_gains, slash_masses, slash_scores
from titan_sparse.kernels.selection.thresholds import (
    Candidates,
    CountBounds,
    Thresholds,
    add_slashes,
    head_thresholds,
    max_missed_mass,
    select,
)
from titan_sparse.kernels.selection.verticals import final_scores, first_scores, mass_histogram
