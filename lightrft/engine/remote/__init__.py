"""Generate on other ranks (--rollout_ranks).

adapter.py is the engine that training ranks see, and server.py is the loop of the ranks that
generate.
"""
