"""Faults of a run: bad updates, ranks that hang or die, stop signals, and lost process groups."""
