"""Start ranks together, watch them while they run, and end them together."""
