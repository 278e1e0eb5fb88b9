"""titan_sparse: long-context LLM training with dynamic sparse attention under context parallelism."""
