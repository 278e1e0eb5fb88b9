"""What a run will cost, worked out without a GPU: FLOPs, memory, time."""
