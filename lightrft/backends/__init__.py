"""Shard models and optimizers, move them to host memory, and take optimizer steps: what strategies are made of."""
