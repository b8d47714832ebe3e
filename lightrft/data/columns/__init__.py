"""Values of rows: Arrow's types and Python objects become plain values."""
