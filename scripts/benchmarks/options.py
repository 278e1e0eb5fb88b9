"""Types of command-line options that several benchmarks share."""

import argparse


def head_set(text: str) -> tuple[int, int]:
    """Query heads and KV heads: "16:2" -> (16, 2)."""
    words = text.partition(":")
    heads = int(words[0]) if words[0].isdigit() else 0
    kv_heads = int(words[2]) if words[2].isdigit() else 0
    if not heads or not kv_heads or heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text}: write query heads:KV heads, a multiple and its divisor, as 16:2"
        )
    return heads, kv_heads


def share(text: str) -> float:
    """A number in (0, 1]."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: write a share above 0 and at most 1, as 0.05")
    return number


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: write a whole number, 1 or more")
    return int(text)
