"""Flags of the algorithm section that the chosen functions do not read."""

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.correction import corrections
from lightrft.algorithms.covariance import marks
from lightrft.algorithms.options import FIELDS, keywords
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config import BOTH_BOUNDS, AlgorithmSection
from lightrft.registry import Registry


def unread_flags(section: AlgorithmSection) -> list[str]:
    """Return a sentence for each flag that the user changed and only other estimators, losses or corrections read.

    ValueError for a name that no registry knows.
    """
    default = AlgorithmSection()
    changed = {name for name in section.written if getattr(section, name) != getattr(default, name)}
    notices = _unread(changed, section.advantage_estimator, estimators)
    notices += _unread(changed, section.policy_loss, policy_losses, marks)
    if section.rollout_correction is not None:
        notices += _unread(changed, section.rollout_correction, corrections)
    return notices


def _unread(changed: set[str], chosen: str, registry: Registry, companions: Registry | None = None) -> list[str]:
    """Compare what the functions of a registry, and what accompanies them under the same names, read of the section."""
    tables = [registry, companions] if companions else [registry]
    reads = {
        name: set().union(*(keywords(table[name]) for table in tables if table is registry or name in table)) & FIELDS
        for name in {*registry.names(), chosen}
    }
    for flag, bounds in BOTH_BOUNDS.items():
        for names in reads.values():
            names |= {flag} if names & set(bounds) else set()
    wasted = changed & set().union(*reads.values()) - reads[chosen]
    return [f"--{name} has no effect with {registry.flag} {chosen}" for name in sorted(wasted)]
