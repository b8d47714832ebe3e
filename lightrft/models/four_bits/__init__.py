"""Frozen matrices in four bits: NF4 with double quantisation."""

SCALE_BLOCK = 64
"""Consecutive elements of a row that share a scale."""
SCALE_GROUP = 256
"""Consecutive scales that share a float32, and the number of values that a scale can have."""
