"""Rules that a configuration must satisfy, beside the bounds of single fields in sections.py."""

import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from lightrft.config.facts import (
    BIASED_FAMILIES,
    EXPERT_FAMILIES,
    RunFacts,
    text_config,
    unreadable,
)
from lightrft.config.references import (
    ENGINE,
    GGUF,
    JUDGE,
    JUDGE_KEY,
    REWARD_KEY,
    SERVER,
    address_problem,
    data_problems,
    eval_sources,
    report_names,
    reward_model_terms,
    reward_terms,
    teacher_terms,
)
from lightrft.config.sections import (
    ALL_BUT_SERVE_REWARD,
    EVALUATED,
    EVERY,
    PPO,
    SAMPLING,
    SUPERVISED,
    TRAINING,
    WITH_ENGINE,
    WITH_PRETRAIN,
    fields_read,
    longest_sequence,
)
from lightrft.config.tables import table
from lightrft.config.values import COLDEST, nearest

COMPARING: list[str] = table("config/presets")["comparing"]
"""Estimators whose advantage is 0 for the only sample of a group."""
LONGEST_NAME = 1000
"""Number of characters of the path or name of a model."""


Rules = Mapping[str, Callable[[RunFacts], Any] | None]
"""Message for a configuration that cannot run -> its condition; None if the message states it.

    {"--pass_k {pass_k} must be at least 1": lambda run: run.pass_k < 1}

The message says what to do instead. Placeholders are attributes of RunFacts, and {found} is the
result of the condition; with {found}, each item of a list gives a message.
"""
STATED: dict[str, list[str]] = table("config/rules")
"""Group -> rules whose messages state their conditions."""


def problems_of(rules: Rules, run: RunFacts) -> list[str]:
    """Return a sentence for each rule that `run` breaks, with the solution."""
    problems = []
    for message, condition in rules.items():
        found = condition(run) if condition else _contradicts(message, run)
        several = isinstance(found, list) and "{found}" in message
        items = found if several else [found]
        problems += [message.format_map(ChainMap({"found": item}, run)) for item in items if item]
    return problems


def _contradicts(sentence: str, run: RunFacts) -> bool:
    flags = re.split("[:;,]", sentence)[0]
    flag, verb, other = re.split(" (needs|does not support|with) ", flags)
    return run.has(flag) and run.has(other) == (verb != "needs")


def _unknown_engine(name: str) -> str:
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
        models += [(flag, term.name) for flag, term in reward_model_terms(run.config.model)]
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
            os.path.isdir(here) or (path.endswith(GGUF) and os.path.isfile(here))
        ):
            problems.append(f"--{name} {path}: no such folder")

    return problems


def _unusable_data(run: RunFacts) -> list[str]:
    sets = [("prompt_data", run.prompt_data), ("pretrain_data", run.pretrain_data)]
    sets += [("eval_data", each.source) for each in run.eval_sets]
    return [
        problem
        for flag, text in sets
        if text and flag in fields_read(run.command)
        for problem in data_problems(flag, text, run.prompt_data_probs)
    ]


def _unusable_addresses(run: RunFacts) -> list[str]:
    addresses = [("--reward", name, REWARD_KEY) for name in run.rewards if name.startswith(SERVER)]
    if JUDGE in run.rewards and run.judge_url not in ("", ENGINE):
        addresses.append(("--judge_url", run.judge_url, JUDGE_KEY))
    return [address_problem(*address) for address in addresses]


def _missing_judge(run: RunFacts) -> list[str]:
    if run.command not in SAMPLING or JUDGE not in run.rewards:
        return []
    needed = ("judge_url",) if run.judge_url == ENGINE else ("judge_url", "judge_model")
    return [name for name in needed if not run[name]]


def _wrong_date(run: RunFacts) -> str:
    date_of_run = run.chat_template_date if run.command in ALL_BUT_SERVE_REWARD else ""
    return unreadable(date.fromisoformat, date_of_run) if date_of_run else ""


def _unusable_inputs(run: RunFacts) -> list[str]:
    problems = unusable_models(run)
    if run.command in PPO and run.teacher_url:
        problems.append(address_problem("--teacher_url", run.teacher_url, "TEACHER_API_KEY"))
    if run.command in SAMPLING:
        problems += [unreadable(reward_terms, run.reward), *_unusable_addresses(run)]
    if run.command in EVALUATED:
        problems += [unreadable(eval_sources, run.eval_data), *_unusable_data(run)]
    if run.command in TRAINING:
        problems.append(unreadable(report_names, run.report_to))
    return problems


INPUTS: Rules = {
    "--reward_pretrain is empty: name the reward model to serve": lambda run: (
        run.command == "serve_reward" and not run.reward_models
    ),
    "--pretrain is empty: set it to a Hugging Face folder, a GGUF file or a hub name": lambda run: (
        run.command in WITH_PRETRAIN and not run.pretrain
    ),
    "{found}": _unusable_inputs,
    "tinker adds up the gradients of several requests, and ZeRO cannot: set --fsdp": lambda run: (
        run.command == "tinker" and run.strategy == "deepspeed"
    ),
    "--reward judge needs --{found}": _missing_judge,
    "--chat_template_date {chat_template_date} is not a date such as 2026-01-31": _wrong_date,
    "--eval_data NAME=SOURCE: {command} computes the loss of one set; give files without"
    " names": lambda run: run.command in SUPERVISED and any(each.name for each in run.eval_sets),
    "--prompt_data is empty: set it to a JSONL or parquet file, a folder of them, or a hub"
    " name": lambda run: run.command in TRAINING and not run.prompt_data,
    "--eval_data is empty: set it to a JSONL or parquet file, a folder of them, or a hub"
    " name": lambda run: run.command == "evaluate" and not run.eval_data,
}


# -- generation


def _other_vocabulary(run: RunFacts) -> str:
    draft = text_config(run.draft_pretrain).get("vocab_size")
    size = run.model_config.get("vocab_size")
    if run.speculative != "draft" or not size or not draft or size == draft:
        return ""
    return f"{draft} tokens, and --pretrain {run.pretrain} of {size}"


def _too_long(run: RunFacts) -> int:
    """Return the length of the longest sequence if the model has no positions for it, else 0."""
    longest = longest_sequence(run.config)
    fits = run.engine_type == "hf" or run.window is None or longest <= run.window
    return 0 if fits else longest


GENERATION_RULES: Rules = {
    **dict.fromkeys(STATED["generation"]),
    f"--temperature, --eval_temperature and --first_token_temperature must be at least"
    f" {COLDEST:g}": lambda run: any(
        value is not None and 0 < value < COLDEST
        for value in (run.temperature, run.eval_temperature, run.first_token_temperature)
    ),
    "--temperature must be above 0: the log-probs of samples have no meaning at 0, and"
    " evaluations are greedy anyway": lambda run: run.temperature == 0 and run.command in SAMPLING,
    "--min_tokens {min_tokens} exceeds --generate_max_len {generate_max_len}": lambda run: (
        run.min_tokens > run.generate_max_len
    ),
    "--speculative mtp: {pretrain} has no layers for it; --speculative group needs"
    " none": lambda run: run.speculative == "mtp" and run.num_mtp_layers == 0,
    "--draft_pretrain {draft_pretrain} has a vocabulary of {found}: both need the same"
    " vocabulary": _other_vocabulary,
    "--reward environment is the reward of an environment or an agent: set --environment or"
    " --agent": lambda run: "environment" in run.rewards and not (run.environment or run.agent),
    "--reward {reward} names a model: a reward model is --reward_pretrain"
    " owner/model": lambda run: any(
        re.fullmatch(r"[^:]*/[^:]*(?<!\.py)", name) for name in run.rewards
    ),
    "--prompt_max_len {prompt_max_len} + --generate_max_len {generate_max_len} make sequences"
    " of up to {found} tokens, and --pretrain {pretrain} has {window} positions: lower one of"
    " the two": _too_long,
}


# -- PPO and similar algorithms


ALGORITHM: Rules = {
    **dict.fromkeys(STATED["algorithm"]),
    "--distill_coef needs a teacher: set --teacher_pretrain or --teacher_url": lambda run: (
        run.distill_coef > 0
        and not (run.teacher_pretrain or run.teacher_url)
        and run.self_teacher == "none"
    ),
    "{found}": lambda run: unreadable(teacher_terms, run.teacher_pretrain),
    "--teacher_key selects one of several teachers, LABEL=PATH,LABEL=PATH in"
    " --teacher_pretrain: set both, or one teacher": lambda run: (
        (run.teacher_key is not None) != (len(run.teachers) > 1)
    ),
    "--ptx_teacher learns what one teacher says about the prompts of --pretrain_data: set"
    " --distill_top_k, and omit --teacher_key and --teacher_prompt_key": lambda run: (
        run.ptx_teacher and (not run.distill_top_k or run.teacher_key or run.teacher_prompt_key)
    ),
    "--entropy_coef {entropy_coef:g} is below 0, and --entropy_target never lowers it below 0:"
    " begin with 0, or omit the target": lambda run: (
        run.entropy_target is not None and run.entropy_coef < 0
    ),
    "a server at --teacher_url computes log-probs at temperature 1: set --temperature 1, or use"
    " --teacher_pretrain": lambda run: (
        run.distill_coef > 0 and run.teacher_url and run.temperature != 1
    ),
    "--rollout_correction_low is above --rollout_correction_high: every token would be"
    " masked": lambda run: (
        run.rollout_correction in ("mis", "icepop")
        and run.rollout_correction_low > run.rollout_correction_high
    ),
    "--rollout_mask_low is above --rollout_mask_high: every sequence would be masked": lambda run: (
        None not in (run.rollout_mask_low, run.rollout_mask_high)
        and run.rollout_mask_low > run.rollout_mask_high
    ),
    "--overlong_buffer_len {overlong_buffer_len} must be between 1 and --generate_max_len"
    " {generate_max_len}": lambda run: (
        run.overlong_buffer
        and run.overlong_buffer_len is not None
        and not 1 <= run.overlong_buffer_len <= run.generate_max_len
    ),
    "--policy_loss cpgd computes the logarithm of 1 - eps_clip_low: --eps_clip_low must be"
    " below 1": lambda run: run.policy_loss == "cpgd" and run.eps_clip_low >= 1,
    "--advantage_estimator {advantage_estimator} compares the samples of a prompt: set"
    " --n_samples_per_prompt 2 or more": lambda run: (
        run.advantage_estimator in COMPARING and run.n_samples_per_prompt == 1
    ),
    "--pass_k {pass_k} must be between 1 and {n_samples_per_prompt}, because it draws from"
    " --n_samples_per_prompt {n_samples_per_prompt}": lambda run: (
        run.advantage_estimator == "pass_at_k" and not 1 <= run.pass_k <= run.n_samples_per_prompt
    ),
}


# -- the prompts and samples of a step


def _shared_samples(run: RunFacts) -> bool:
    """Return whether several ranks share samples, or an engine."""
    shares_engine = run.engine_tp_size > 1 and not run.rollout_ranks
    return max(run.tp_size, run.sequence_ranks) > 1 or shares_engine


def _other_batch_size(run: RunFacts) -> int:
    """Return the largest batch size below --train_batch_size that divides the samples of a step.

    It is 0 if that of --train_batch_size does.
    """
    divides = min(run.num_samples, run.train_batch_size) <= 0 or (
        run.num_samples % run.train_batch_size == 0
    )
    if divides:
        return 0
    smaller = range(min(run.num_samples, run.train_batch_size), 0, -1)
    return next(size for size in smaller if run.num_samples % size == 0)


def _too_small(run: RunFacts) -> list[str]:
    longest = run.prompt_max_len + run.generate_max_len
    limits = ("max_tokens_per_microbatch", "max_tokens_per_logprob_microbatch")
    return [
        f"{longest} tokens do not fit into {name} {run[name]}"
        for name in limits
        if run[name] is not None and 0 < run[name] < longest
    ]


ROLLOUT: Rules = {
    **dict.fromkeys(STATED["rollout"]),
    "--max_staleness learns from samples of older weights: set --rollout_correction tis, or"
    " --use_engine_logprobs": lambda run: (
        run.max_staleness > 0 and run.rollout_correction is None and not run.use_engine_logprobs
    ),
    "--overlap needs whole samples on each rank, and an engine on each: omit --tp_size,"
    " --sp_size, --cp_size and --engine_tp_size": lambda run: run.overlap and _shared_samples(run),
    "--partial_rollout with --over_sampling continues responses, which can split a text of"
    " --stop: set only one": lambda run: run.partial_rollout and run.over_sampling > 1 and run.stop,
    "rollout_batch_size {rollout_batch_size} x n_samples_per_prompt {n_samples_per_prompt} ="
    " {num_samples} samples are not a multiple of train_batch_size {train_batch_size}, but"
    " of {found}": _other_batch_size,
    "--canaries gives prompts the labels of other rows, and an environment or a reward model does not"
    " read them: set --canary_data, rows whose reward cannot be earned": lambda run: (
        run.canaries and not run.canary_data and (run.environment or run.reward_models)
    ),
    "prompt_max_len {prompt_max_len} + generate_max_len {generate_max_len} = {found}": _too_small,
}


# -- judged answers, media


KTO: Rules = {
    "--train_batch_size must be at least 2: KTO compares each prompt with the answer to another"
    " one": lambda run: run.train_batch_size < 2
}

REWARD_MODEL: Rules = {
    **dict.fromkeys(STATED["reward_model"]),
    "--reward_heads with several names needs --head_key, the column that names the head of a"
    " row": lambda run: len(run.reward_heads) > 1 and run.head_key is None,
}

TRAINING_RULES: Rules = {
    **dict.fromkeys(STATED["training"]),
    "--no_freeze_vision_tower needs --images_key, --videos_key or --audios_key: only media"
    " train a tower": lambda run: not run.freeze_vision_tower and not run.media_flags,
}


# -- the layout over the ranks


def _undivided(run: RunFacts) -> str:
    """Return the sizes whose product does not divide the number of training ranks."""
    sizes = {
        "dp_replicate": run.dp_replicate,
        "cp_size" if run.cp_size > 1 else "sp_size": run.sequence_ranks,
        "tp_size": run.tp_size,
    }
    divides = run.num_training_ranks % (run.dp_replicate * run.sequence_ranks * run.tp_size) == 0
    written = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
    return "" if divides else written


def _heads_of_ulysses(run: RunFacts) -> str:
    heads = run.heads.get("attention heads", 0)
    ulysses = run.cp_size == 1 and run.sp_impl != "zigzag"
    if not ulysses or heads % run.tp_size or heads // run.tp_size % run.sequence_ranks == 0:
        return ""
    if run.tp_size == 1:
        return f"{heads} attention heads"
    return f"{heads // run.tp_size} attention heads on each rank of --tp_size {run.tp_size}"


def _undivided_experts(run: RunFacts) -> str:
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


def _unknown_routers(run: RunFacts) -> list[str]:
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


def _against_cp_size(run: RunFacts) -> str:
    agreeing = {"sp_size": (1, run.cp_size), "sp_impl": ("auto", "zigzag")}
    wrong = [
        f"--{name} {run[name]}" for name, values in agreeing.items() if run[name] not in values
    ]
    return " ".join(wrong) if run.cp_size > 1 else ""


STRATEGY: Rules = {
    **dict.fromkeys(STATED["strategy"]),
    "{found}": lambda run: _unknown_engine(run.config.engine.engine_type),
    "--cp_size {cp_size} is short for --sp_size {cp_size} --sp_impl zigzag and contradicts"
    " {found}: set only one": _against_cp_size,
    "--target_modules is empty: name linear layers, or use all-linear": lambda run: (
        not run.target_modules
    ),
    "--target_modules takes either all-linear or names": lambda run: (
        len(run.target_modules) > 1 and "all-linear" in run.target_modules
    ),
    "--lora_dropout {lora_dropout} needs --tp_size 1: ranks that split a layer would drop"
    " different inputs": lambda run: run.lora_rank > 0 and run.lora_dropout > 0 and run.tp_size > 1,
    "--lora_rank with --tp_size in bfloat16 needs --lora_sync adapter and an engine that holds"
    " adapters: ranks that split a layer cannot round the merged matrix as the engine"
    " does": lambda run: (
        run.lora_rank > 0 and run.tp_size > 1 and run.bf16 and run.lora_sync == "merged"
    ),
    "--ep_size {ep_size} does not support {found}": _undivided_experts,
    "--lora_rank with --ep_size needs --target_modules with the names of linear layers, such as"
    " those of the attention: experts have no adapters": lambda run: (
        run.ep_size > 1 and run.lora_rank > 0 and "all-linear" in run.target_modules
    ),
}
"""What no strategy can do, on any number of ranks."""

ROUTER_RULES: Rules = {**dict.fromkeys(STATED["routers"]), "{found}": _unknown_routers}
"""What the routers of mixtures of experts cannot do."""

DEEPSPEED: Rules = {
    **dict.fromkeys(STATED["deepspeed"]),
    "--exact needs --fsdp: it was not tested with DeepSpeed": lambda run: (
        run.exact and not run.fsdp and run.command in ("", *PPO)
    ),
}
"""What ZeRO cannot do."""


LAYOUT_RULES: Rules = {
    "--rollout_ranks {rollout_ranks} leaves none of the {world_size} processes for"
    " training": lambda run: run.rollout_ranks >= run.world_size,
    "--engine_tp_size {engine_tp_size} does not divide the {num_generating_ranks} processes"
    " that generate": lambda run: run.num_generating_ranks % run.engine_tp_size,
    "{found} does not divide the {num_training_ranks} processes": _undivided,
    "--ep_size {ep_size} does not divide the {found} ranks that shard a copy of the"
    " model": lambda run: (
        (ranks := run.num_training_ranks // (run.dp_replicate * run.tp_size)) % run.ep_size
        and ranks
    ),
    "--zpg {zpg} does not divide the {num_training_ranks} processes": lambda run: (
        run.strategy == "deepspeed" and run.num_training_ranks % run.zpg
    ),
    "--tp_size {tp_size} does not divide the model's {found}": lambda run: [
        f"{count} {name}" for name, count in run.heads.items() if count % run.tp_size
    ],
    "--sp_size {sequence_ranks} does not divide the model's {found}; --sp_impl zigzag has no"
    " such condition": _heads_of_ulysses,
    "serve has one engine on all of its processes: set --engine_tp_size {world_size}, or start"
    " {engine_tp_size} processes": lambda run: (
        run.command == "serve" and run.world_size != run.engine_tp_size
    ),
}
"""What the ranks of this run cannot share."""

RULES = (
    (EVERY, INPUTS),
    (WITH_ENGINE, GENERATION_RULES),
    (PPO, ALGORITHM),
    (PPO, ROLLOUT),
    (PPO, dict.fromkeys(STATED["exact"])),
    (("train_dpo",), dict.fromkeys(STATED["dpo"])),
    (("train_kto",), KTO),
    (("train_rm", "train_prm"), dict.fromkeys(STATED["scores"])),
    (("train_rm",), REWARD_MODEL),
    (TRAINING, TRAINING_RULES),
    (EVERY, STRATEGY),
    (PPO, ROUTER_RULES),
)
"""Commands, and the rules for them.

DEEPSPEED and LAYOUT_RULES depend on the strategy and the sizes.
"""
