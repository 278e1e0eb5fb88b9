"""titan_sparse: long-context LLM training with dynamic sparse attention under context parallelism.

attention: attend(), usable as a library (docs/attention.md). config, data, models: what a run is, reads and trains.
trainer: wires them and runs the steps; the entry is train.py. docs/design.md has the words and the contracts.
"""
