"""What a run will cost, worked out without a GPU: FLOPs, memory, time."""

from titan_sparse.options.extras import need_here

need_here("train")
