"""Generation on other ranks (--rollout_ranks): the engine that ranks which train see, and the loop
of those that generate.
"""
