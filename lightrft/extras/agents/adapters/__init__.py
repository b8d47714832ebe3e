"""Environments and tools of other packages. Each file is imported when it is chosen."""
