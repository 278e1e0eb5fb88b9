"""Options with their ranges, and the options of patterns. Imports no torch."""
