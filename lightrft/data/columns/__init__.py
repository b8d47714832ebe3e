"""Values of rows: how those of Arrow and of Python objects become plain ones."""
