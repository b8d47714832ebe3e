"""What a run tells: metrics over all ranks, where time and memory go, sinks for both, the report of a finished run."""
