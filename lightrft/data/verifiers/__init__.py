"""Tasksets of the package verifiers as data."""
