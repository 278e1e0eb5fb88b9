"""Options with their ranges, the options of patterns, and the extras of the
package. Imports no torch."""
