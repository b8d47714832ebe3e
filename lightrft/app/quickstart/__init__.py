"""The quick start: its inputs, its two configurations and the summary of its run."""
