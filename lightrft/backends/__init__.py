"""Building blocks of strategies: shard models and optimizers, move them to host memory, and take
optimizer steps.
"""
