"""Find the flags of the algorithm section that the chosen functions do not read."""

from collections.abc import Collection

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.correction import corrections
from lightrft.algorithms.covariance import marks
from lightrft.algorithms.options import FIELDS
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config.resolve import BOTH_BOUNDS
from lightrft.config.sections import AlgorithmSection
from lightrft.core.losses import reach_of
from lightrft.core.table import keywords
from lightrft.registry import Registry


def unread_flags(section: AlgorithmSection) -> list[str]:
    """Return a sentence for each changed flag that the chosen functions do not read, and for a
    policy loss that does not say what it depends on.

    Only other estimators, losses or corrections read these flags. Raises ValueError for a name that
    no registry knows.
    """
    default = AlgorithmSection()
    changed = {name for name in section.written if getattr(section, name) != getattr(default, name)}
    notices = unread(estimators, section.advantage_estimator, changed)
    notices += unread(policy_losses, section.policy_loss, changed, marks)
    if section.rollout_correction is not None:
        notices += unread(corrections, section.rollout_correction, changed)
    if reach_of(policy_losses[section.policy_loss]) == "batch":
        notices.append(
            f"--policy_loss {section.policy_loss}: the loss of a token may depend on all others, so"
            " that gradients wait for the whole batch; if it does not, say so:"
            f' {section.policy_loss.rpartition(":")[2]}.properties = {{"per": "token"}}'
        )
    return notices


def unread_columns(section: AlgorithmSection, columns: Collection[str]) -> list[str]:
    """Return a sentence for each column of the data that an estimator names with a default."""
    read = keywords(estimators[section.advantage_estimator])
    optional = {name for name, needed in read.items() if not needed}
    return [
        f"--advantage_estimator {section.advantage_estimator}: the column {name!r} of the data is"
        " not read, because the parameter has a default; leave the default out"
        for name in sorted((optional - FIELDS) & set(columns))
    ]


def unread(
    registry: Registry, chosen: str, changed: set[str], companions: Registry | None = None
) -> list[str]:
    """Return a sentence for each changed flag that only other functions of the registry read.

    `companions` has functions that belong to some names of the registry and read flags as well.
    """
    tables = [registry, companions] if companions else [registry]
    reads = {
        name: set().union(
            *(keywords(table[name]) for table in tables if table is registry or name in table)
        )
        & FIELDS
        for name in {*registry.names(), chosen}
    }

    # A flag that sets both bounds is read by whoever reads one of them.
    for flag, bounds in BOTH_BOUNDS.items():
        for names in reads.values():
            names |= {flag} if names & set(bounds) else set()

    wasted = changed & set().union(*reads.values()) - reads[chosen]
    return [f"--{name} has no effect with {registry.flag} {chosen}" for name in sorted(wasted)]
