"""Generation on other ranks (--rollout_ranks): the engine that training ranks see, and the loop of
the ranks that generate.
"""
