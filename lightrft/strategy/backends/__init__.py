"""Building blocks of strategies: shard, move to host memory, and take optimizer steps."""
