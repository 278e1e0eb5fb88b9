"""Types of options on the command lines of scripts. Imports no torch."""

import argparse


def head_set(text: str) -> tuple[int, int]:
    """Query heads and KV heads: "16:2" -> (16, 2)."""
    heads, _, kv_heads = text.partition(":")
    are_numbers = heads.isdigit() and kv_heads.isdigit()
    if not are_numbers or int(kv_heads) == 0 or int(heads) % int(kv_heads):
        raise argparse.ArgumentTypeError(
            f"{text}: write query heads:KV heads, a multiple and its divisor, as 16:2"
        )
    return int(heads), int(kv_heads)


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: write a share above 0 and at most 1, as 0.05")
    return number
