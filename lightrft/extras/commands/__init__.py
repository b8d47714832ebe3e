"""Hold the commands of what stands beside training."""
