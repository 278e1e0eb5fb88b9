"""Attention inside other people's models and trainers. Each package needs one library of theirs."""
