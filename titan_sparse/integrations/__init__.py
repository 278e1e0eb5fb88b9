"""Attention inside other projects' models and trainers. Each package needs one other library."""
