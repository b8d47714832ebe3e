"""Observation of a run: metrics over all ranks, time and memory of a step, sinks for both, and the
report of a finished run.
"""
