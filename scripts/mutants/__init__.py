"""Mutation testing: one small fault at a time is planted in a file, and its tests have to notice.

    python -m scripts.mutants run --out mutants.jsonl [--files titan_sparse/loss.py ...]
    python -m scripts.mutants report mutants.jsonl

CONTRIBUTING.md says when to use it.
"""
