"""Observe a run: metrics over all ranks, time and memory of a step, sinks, and the report."""
