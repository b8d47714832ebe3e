"""Rules that a configuration must satisfy, beside the bounds of single fields in sections.py."""

import os
import re
from collections import ChainMap
from collections.abc import Iterable
from datetime import date

from lightrft.config import references, sections
from lightrft.config.facts import (
    BIASED_FAMILIES,
    EXPERT_FAMILIES,
    RunFacts,
    text_config,
    unreadable,
)
from lightrft.config.tables import table
from lightrft.config.values import COLDEST, nearest

COMPARING: list[str] = table("config/presets")["comparing"]
"""Estimators whose advantage is 0 for the only sample of a group."""
MODEL_NAME = re.compile(r"[^:]*/[^:]*(?<!\.py)")
"""Name of a model of a hub, or a folder."""
LONGEST_NAME = 1000
"""Number of characters of the path or name of a model."""


Rule = str | dict[str, str]
"""Message that states its own condition, or what it `says` and the condition, `if`.

    "--margin_key needs --rm_loss sigmoid or ties: logexp has no margin"
    {"says": "--pass_k {pass_k} must be at least 1", "if": "pass_k < 1"}

The message says what to do instead. Placeholders are attributes of RunFacts, and {found} is the
value of the condition, an expression of Python; with {found}, each item of a list gives a message.
"""
RULES: dict[str, list[Rule]] = table("config/rules")
COMMANDS_OF_RULES = {
    "serve_reward": ("serve_reward",),
    "pretrain": sections.WITH_PRETRAIN,
    "inputs": sections.EVERY,
    "supervised": sections.SUPERVISED,
    "prompt_data": sections.TRAINING,
    "evaluate": ("evaluate",),
    "generation": sections.WITH_ENGINE,
    "algorithm": sections.PPO,
    "rollout": sections.PPO,
    "exact": sections.PPO,
    "dpo": ("train_dpo",),
    "kto": ("train_kto",),
    "scores": ("train_rm", "train_prm"),
    "reward_model": ("train_rm",),
    "training": sections.TRAINING,
    "strategy": sections.EVERY,
    "routers": sections.PPO,
}
"""Group of rules -> commands. Two more groups depend on the strategy and the sizes: `deepspeed` and
`layout`.
"""


def problems_of(rules: Iterable[Rule], run: RunFacts) -> list[str]:
    """Return a sentence for each rule that `run` breaks, with the solution."""
    problems = []
    for rule in rules:
        if isinstance(rule, str):
            message, found = rule, _contradicts(rule, run)
        else:
            message = rule["says"]
            # Rules are files of this package, and no user's text is evaluated.
            found = eval(rule["if"], globals(), ChainMap({"run": run}, run))

        several = isinstance(found, list) and "{found}" in message
        items = found if several else [found]
        problems += [message.format_map(ChainMap({"found": item}, run)) for item in items if item]

    return problems


def _contradicts(sentence: str, run: RunFacts) -> bool:
    flags = re.split("[:;,]", sentence)[0]
    flag, verb, other = re.split(" (needs|does not support|with) ", flags)
    return run.has(flag) and run.has(other) == (verb != "needs")


def unknown_engine(name: str) -> str:
    known = ("auto", "vllm", "sglang", "hf")
    if name in known or ":" in name:
        return ""
    return (
        f"--engine_type {name!r}: unknown{nearest(name, known)} (choices: {', '.join(known)}; your"
        " own: module:Class or file.py:Class)"
    )


# -- models, data and servers


def unusable_models(run: RunFacts) -> list[str]:
    """Return the models that are not where the flags say, or named wrongly."""
    problems = []
    names = ("pretrain", "critic_pretrain", "draft_pretrain")
    models = [(name, run[name]) for name in names]
    try:
        models += [("teacher_pretrain", path) for _, path in run.teachers]
        models += [
            (flag, term.name) for flag, term in references.reward_model_terms(run.config.model)
        ]
    except ValueError as error:
        problems.append(str(error))

    for name, path in models:
        here = os.path.expanduser(path)
        if len(path) > LONGEST_NAME:
            problems.append(
                f"--{name} {path[:50]}... has {len(path)} characters: no folder and no model of a hub"
                " has such a name"
            )
        elif path.startswith((".", "/", "~")) and not (
            os.path.isdir(here) or (path.endswith(references.GGUF) and os.path.isfile(here))
        ):
            problems.append(f"--{name} {path}: no such folder")

    return problems


def _unusable_data(run: RunFacts) -> list[str]:
    sets = [("prompt_data", run.prompt_data), ("pretrain_data", run.pretrain_data)]
    sets += [("eval_data", each.source) for each in run.eval_sets]
    return [
        problem
        for flag, text in sets
        if text and flag in sections.fields_read(run.command)
        for problem in references.data_problems(flag, text, run.prompt_data_probs)
    ]


def _unusable_addresses(run: RunFacts) -> list[str]:
    addresses = [
        ("--reward", name, references.REWARD_KEY)
        for name in run.rewards
        if name.startswith(references.SERVER)
    ]
    if references.JUDGE in run.rewards and run.judge_url not in ("", references.ENGINE):
        addresses.append(("--judge_url", run.judge_url, references.JUDGE_KEY))
    return [references.address_problem(*address) for address in addresses]


def missing_judge(run: RunFacts) -> list[str]:
    if run.command not in sections.SAMPLING or references.JUDGE not in run.rewards:
        return []
    needed = ("judge_url",) if run.judge_url == references.ENGINE else ("judge_url", "judge_model")
    return [name for name in needed if not run[name]]


def wrong_date(run: RunFacts) -> str:
    date_of_run = run.chat_template_date if run.command in sections.ALL_BUT_SERVE_REWARD else ""
    return unreadable(date.fromisoformat, date_of_run) if date_of_run else ""


def unusable_inputs(run: RunFacts) -> list[str]:
    problems = unusable_models(run)
    if run.command in sections.PPO and run.teacher_url:
        problems.append(
            references.address_problem("--teacher_url", run.teacher_url, "TEACHER_API_KEY")
        )
    if run.command in sections.SAMPLING:
        problems += [unreadable(references.reward_terms, run.reward), *_unusable_addresses(run)]
    if run.command in sections.EVALUATED:
        problems += [unreadable(references.eval_sources, run.eval_data), *_unusable_data(run)]
    if run.command in sections.TRAINING:
        problems.append(unreadable(references.report_names, run.report_to))
    return problems


# -- generation


def other_vocabulary(run: RunFacts) -> str:
    draft = text_config(run.draft_pretrain).get("vocab_size")
    size = run.model_config.get("vocab_size")
    if run.speculative != "draft" or not size or not draft or size == draft:
        return ""
    return f"{draft} tokens, and --pretrain {run.pretrain} of {size}"


def too_cold(run: RunFacts) -> str:
    """Return the lowest temperature if one is below it and above 0."""
    temperatures = (run.temperature, run.eval_temperature, run.first_token_temperature)
    is_cold = any(value is not None and 0 < value < COLDEST for value in temperatures)
    return f"{COLDEST:g}" if is_cold else ""


def too_long(run: RunFacts) -> int:
    """Return the length of the longest sequence if the model has no positions for it, else 0."""
    longest = sections.longest_sequence(run.config)
    fits = run.engine_type == "hf" or run.window is None or longest <= run.window
    return 0 if fits else longest


def unreadable_teachers(run: RunFacts) -> str:
    return unreadable(references.teacher_terms, run.teacher_pretrain)


# -- the prompts and samples of a step


def shared_samples(run: RunFacts) -> bool:
    """Return whether several ranks share samples, or an engine."""
    shares_engine = run.engine_tp_size > 1 and not run.rollout_ranks
    return max(run.tp_size, run.sequence_ranks) > 1 or shares_engine


def other_batch_size(run: RunFacts) -> int:
    """Return the largest batch size below --train_batch_size that divides the samples of a step.

    It is 0 if that of --train_batch_size does.
    """
    most = min(run.num_samples, run.train_batch_size)
    if most <= 0 or run.num_samples % run.train_batch_size == 0:
        return 0
    return next(size for size in range(most, 0, -1) if run.num_samples % size == 0)


def too_small(run: RunFacts) -> list[str]:
    longest = run.prompt_max_len + run.generate_max_len
    limits = ("max_tokens_per_microbatch", "max_tokens_per_logprob_microbatch")
    return [
        f"{longest} tokens do not fit into {name} {run[name]}"
        for name in limits
        if run[name] is not None and 0 < run[name] < longest
    ]


# -- the layout over the ranks


def undivided(run: RunFacts) -> str:
    """Return the sizes whose product does not divide the number of training ranks."""
    sizes = {
        "dp_replicate": run.dp_replicate,
        "cp_size" if run.cp_size > 1 else "sp_size": run.sequence_ranks,
        "tp_size": run.tp_size,
    }
    divides = run.num_training_ranks % (run.dp_replicate * run.sequence_ranks * run.tp_size) == 0
    written = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
    return "" if divides else written


def undivided_heads(run: RunFacts) -> list[str]:
    return [f"{count} {name}" for name, count in run.heads.items() if count % run.tp_size]


def heads_of_ulysses(run: RunFacts) -> str:
    heads = run.heads.get("attention heads", 0)
    ulysses = run.cp_size == 1 and run.sp_impl != "zigzag"
    if not ulysses or heads % run.tp_size or heads // run.tp_size % run.sequence_ranks == 0:
        return ""
    if run.tp_size == 1:
        return f"{heads} attention heads"
    return f"{heads // run.tp_size} attention heads on each rank of --tp_size {run.tp_size}"


def undivided_experts(run: RunFacts) -> str:
    """Return the model whose experts --ep_size cannot divide; one on the hub is loaded first."""
    if run.ep_size == 1 or not run.model_config:
        return ""
    kind = run.model_config.get("model_type", "")
    if not run.num_experts:
        return f"{run.pretrain}: a model of type {kind} has no experts"
    if kind not in EXPERT_FAMILIES:
        return f"models of type {kind}; supported are {', '.join(EXPERT_FAMILIES)}"
    if run.num_experts % run.ep_size:
        return f"{run.pretrain}: it does not divide the {run.num_experts} experts of a layer"
    return ""


def unknown_routers(run: RunFacts) -> list[str]:
    """Return the flags about routers that the model does not support.

    A model on the hub is loaded first.
    """
    kind = run.model_config.get("model_type", "")
    flags = (
        (run.router_replay, "--router_replay", EXPERT_FAMILIES),
        (run.router_bias_rate > 0, f"--router_bias_rate {run.router_bias_rate}", BIASED_FAMILIES),
    )
    return [
        f"{flag} does not support models of type {kind}; supported are {', '.join(families)}"
        for used, flag, families in flags
        if used and kind and kind not in families
    ]


def against_cp_size(run: RunFacts) -> str:
    agreeing = {"sp_size": (1, run.cp_size), "sp_impl": ("auto", "zigzag")}
    wrong = [
        f"--{name} {run[name]}" for name, values in agreeing.items() if run[name] not in values
    ]
    return " ".join(wrong) if run.cp_size > 1 else ""
