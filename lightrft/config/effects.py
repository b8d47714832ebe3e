"""Find the flags that the user wrote and that change nothing in this run."""

import re
from collections.abc import Callable
from typing import Any

from lightrft.config import sections
from lightrft.config.facts import RunFacts
from lightrft.config.references import JUDGE

OTHER_NAMES = {("train_ppo", "beta"): "; the coefficient of the KL penalty is --init_kl_coef"}
"""Command and flag -> the flag here that means what other tools mean by it."""
LITERAL_TEXTS = ("input_template", "system_prompt", "step_separator", "stop")
"""Fields with texts that the model reads or writes."""
ESCAPE = re.compile(r"\\[nt](?!(eq?|u|abla|ot|i|ewline|ext\w*|imes|heta|au|an|op?|riangle|ilde)\b)")
"""A line break or a tab as programs write it, which is not the beginning of a command of LaTeX."""


def flags_without_effect(config: sections.Config, command: str) -> list[str]:
    """Return a sentence with the reason for each changed flag that nothing reads in this run."""
    run = RunFacts(config, command)
    read = sections.fields_read(command)
    notices = []
    for name in sections.section_of_field():
        if name not in config.written or not _changed(run, name):
            continue
        if name not in read:
            other = OTHER_NAMES.get((command, name), "")
            notices.append(f"--{name} has no effect in {command}{other}")
            continue
        if need := _missing(run, name):
            notices.append(f"--{name} has no effect without {need}")
        if _holds(run, unless := sections.options()[name].unless):
            notices.append(f"--{name} has no effect with {unless}")

    return notices + _literal_escapes(run)


def _literal_escapes(run: RunFacts) -> list[str]:
    """Return a sentence for each text that was probably meant to have a line break."""
    notices = []
    for name in LITERAL_TEXTS:
        texts = getattr(run, name) or ""
        if escape := ESCAPE.search(texts if isinstance(texts, str) else " ".join(texts)):
            notices.append(
                f"--{name} has a backslash and the letter {escape[0][1]}, which stay as they are;"
                " for a line break or a tab write $'...' in a shell, and double quotes in YAML"
            )
    return notices


def _changed(run: RunFacts, name: str) -> bool:
    """Return whether a field differs from the default.

    The file of a resolved configuration contains every field, so a written value may well be the
    default.
    """
    section = getattr(run.config, sections.section_of_field()[name])
    return getattr(section, name) != getattr(type(section)(), name)


def _missing(run: RunFacts, name: str) -> str:
    """Return what a field needs to have an effect and does not have; empty if there is nothing."""
    needs = sections.options()[name].needs
    need = needs if isinstance(needs, str) else needs.get(run.command, "")
    return need if need and not _holds(run, need) else ""


def _holds(run: RunFacts, need: str) -> bool:
    """Return whether the run has one of the flags in a text such as `--tp_size`, `--rm_loss ties`
    or `--over_sampling or --rollout_schedule longest_first`.

    A command that reads none of them does without.
    """
    if need in COMPUTED_NEEDS:
        return COMPUTED_NEEDS[need](run)

    holds = []
    flag = ""
    for term in need.replace(" or ", ", ").split(", ") if need else ():
        words = term.split()
        if term.startswith("--"):
            flag = words.pop(0).removeprefix("--")
        if flag in sections.fields_read(run.command):
            holds.append(_is_set(run, flag, words))

    return any(holds) or bool(need and not holds)


def _is_set(run: RunFacts, name: str, values: list[str]) -> bool:
    """Return whether a field has the value `values[0]`; without one, whether it is switched on
    and has an effect itself.
    """
    value: Any = getattr(run, name)
    if values:
        return values[0] in str(value).split(",")
    on = value is True or (bool(value) and _changed(run, name))
    return on and not _missing(run, name)


def _computes_early(run: RunFacts) -> bool:
    """Return whether models compute something of the samples before the first update on them:
    log-probs, entropies, values or scores.
    """
    updates = run.num_samples > run.train_batch_size or run.max_epochs > 1
    entropy = run.entropy_filter or run.high_entropy_token_ratio or run.entropy_target
    marked = run.policy_loss in ("kl_cov", "clip_cov")
    distills = run.distill_coef > 0 and not run.distill_top_k
    algorithm = run.config.algorithm
    models = sections.needs_reference(algorithm) or sections.needs_critic(algorithm)
    return bool(updates or entropy or marked or distills or models or run.reward_models)


COMPUTED_NEEDS: dict[str, Callable[[RunFacts], bool]] = {
    sections.A_JUDGE: lambda run: JUDGE in run.rewards,
    sections.EARLY_OUTPUTS: _computes_early,
    sections.OTHER_FORMATS: lambda run: any(not each.benchmark for each in run.eval_sets),
    sections.SEVERAL_SETS: lambda run: "," in run.prompt_data,
}
"""What a field needs, where it is not the value of a flag -> whether the run has it."""
