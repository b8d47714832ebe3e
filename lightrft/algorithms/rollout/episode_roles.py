"""Roles that a model has in the conversations of an episode."""

import math

from lightrft.core.samples import Sample

POLICY = "policy"
"""Role of a conversation that names none."""
ROLE_MARK = "policy:"
"""Text before the name of a role, in the model's name of a request and in components of rewards."""


def role_of(row: Sample) -> str:
    """Return the role of a conversation: a sample, or a branch of an episode."""
    return row.episode.role if row.episode else POLICY


def role_rewards(sample: Sample) -> dict[str, float]:
    """Return the reward of each role that has a separate one; empty for most samples.

    Components without the mark of a role belong to every role.
    """
    roles = {name: name.partition(ROLE_MARK)[2] for name in sample.reward_components}
    components = [(roles[name], value) for name, value in sample.reward_components.items()]
    return {
        role: math.fsum(value for owner, value in components if owner in ("", role))
        for role in roles.values()
        if role
    }
