"""OpenAI-compatible server of an episode.

Requests of any client become turns whose tokens are learned as they were sampled.
"""
