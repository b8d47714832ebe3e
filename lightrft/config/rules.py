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
    has_episodes,
    longest_sequence,
    media_columns,
)
from lightrft.config.values import COLDEST, nearest

COMPARING = (
    *("grpo", "group_norm", "dapo", "gspo", "gmpo", "cispo", "sapo", "cpgd"),
    *("dr_grpo", "reinforce++_baseline", "reinforce_baseline", "rloo", "opo", "pass_at_k"),
    *("dppo", "dro", "gdpo", "gpg", "lite_ppo", "maxrl", "turn_grpo"),
)
"""Estimators whose advantage is 0 for the only sample of a group."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a model's configuration with the number of experts."""
LONGEST_NAME = 1000
"""Number of characters of the path or name of a model."""
UNSHAPED = ("overlong_buffer", "reward_running_norm", "reward_group_norm", "reward_clip")
"""Fields that change the reward, which remax and gdpo compare without them."""
SGLANG_MEDIA = {
    "videos": "requests with videos never ended in SGLang on a CPU",
    "audios": "sound was not tested in SGLang",
}
"""Media that SGLang is not given -> the reason."""


Rules = Mapping[str, Callable[[RunFacts], Any] | None]
"""Message for a configuration that cannot run -> its condition, or STATED.

    {"--pass_k {pass_k} must be at least 1": lambda run: run.pass_k < 1}

The message says what to do instead. Placeholders are attributes of RunFacts, and {found} is the
result of the condition; with {found}, each item of a list gives a message.
"""
STATED = None
"""The message itself states the condition.

It begins with two flags, such as `--exact needs --engine_type hf or vllm` or `--distill_top_k does
not support --exact`; the reason follows.
"""


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
    "--overwrite with --load_checkpoint: one starts from the beginning, and the other"
    " resumes; set only one": lambda run: (
        run.command in TRAINING and run.overwrite and run.load_checkpoint
    ),
}


# -- generation


def _sglang_media(run: RunFacts) -> list[str]:
    media = media_columns(run.config.data) if run.engine_type == "sglang" else {}
    return [
        f"--{medium}_key needs --engine_type vllm or hf: {SGLANG_MEDIA[medium]}"
        for medium in media
        if medium in SGLANG_MEDIA
    ]


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
    "--min_tokens with --stop: tokens that end a response are excluded, and not texts; use"
    " --stop_token_ids": STATED,
    "--engine_args needs --engine_type vllm or sglang, whose arguments they are: omit them,"
    " or set --engine_type": STATED,
    "--speculative {speculative} needs --engine_type vllm; {engine_type} generates without"
    " drafts": STATED,
    "--min_p with --speculative: vLLM does not verify drafts with min p; use --top_p or"
    " --top_k": STATED,
    "--speculative draft needs --draft_pretrain, a small model with the vocabulary of"
    " --pretrain; --speculative group needs no other model": STATED,
    "--speculative eagle3 needs --draft_pretrain, an EAGLE-3 head for --pretrain;"
    " --speculative group needs no other model": STATED,
    "--draft_pretrain {draft_pretrain} needs --speculative draft or eagle3: --speculative"
    " {speculative} does not use it": STATED,
    "--draft_learning_rate needs --speculative draft, whose model it trains: --speculative is"
    " {speculative}": STATED,
    "{media_flags} does not support --draft_learning_rate: a model of text is trained, which"
    " reads no media; omit one of them": STATED,
    "--lora_sync adapter needs --engine_type vllm or hf: SGLang gets merged weights here": STATED,
    "--tools needs --apply_chat_template: the chat template describes them to the model": STATED,
    "--speculative mtp: {pretrain} has no layers for it; --speculative group needs"
    " none": lambda run: run.speculative == "mtp" and run.num_mtp_layers == 0,
    "--draft_pretrain {draft_pretrain} has a vocabulary of {found}: both need the same"
    " vocabulary": _other_vocabulary,
    "{found}": _sglang_media,
    "--rollout_quantization {rollout_quantization} does not support --engine_type hf, which"
    " computes with transformers' layers: they have no INT8 or FP8 products; use vllm": STATED,
    "--rollout_quantization {rollout_quantization} does not support --engine_type sglang:"
    " SGLang packs INT8 weights when it starts, and takes no new ones; use vllm": STATED,
    "--rollout_quantization {rollout_quantization} does not support --speculative draft or"
    " eagle3 or mtp: the model that drafts is not quantised; use --speculative group or"
    " ngram": STATED,
    "--reward environment is the reward of an environment or an agent: set --environment or"
    " --agent": lambda run: "environment" in run.rewards and not (run.environment or run.agent),
    "--reward {reward} names a model: a reward model is --reward_pretrain"
    " owner/model": lambda run: any(
        re.fullmatch(r"[^:]*/[^:]*(?<!\.py)", name) for name in run.rewards
    ),
    "--agent has its own tools and its own environment: omit --environment and"
    " --tools": lambda run: run.agent and (run.environment or run.tools),
    "{media_flags}: --environment, --agent and --tools need prompts of text, since the tokens"
    " of their turns and observations are not expanded for media": lambda run: (
        has_episodes(run.config.environment) and run.media_flags
    ),
    "--prompt_max_len {prompt_max_len} + --generate_max_len {generate_max_len} make sequences"
    " of up to {found} tokens, and --pretrain {pretrain} has {window} positions: lower one of"
    " the two": _too_long,
}


# -- PPO and similar algorithms


def _truncations(run: RunFacts) -> list[str]:
    used = {
        "--top_k": run.top_k > 0,
        "--top_p": run.top_p < 1,
        "--min_p": run.min_p > 0,
        "--min_tokens": run.min_tokens > 0,
    }
    return [flag for flag, is_used in used.items() if is_used]


def _shaping(run: RunFacts, estimator: str) -> str:
    shaping = " ".join(f"--{name}" for name in UNSHAPED if run[name])
    return shaping if run.advantage_estimator == estimator else ""


ALGORITHM: Rules = {
    "--distill_coef needs a teacher: set --teacher_pretrain or --teacher_url": lambda run: (
        run.distill_coef > 0
        and not (run.teacher_pretrain or run.teacher_url)
        and run.self_teacher == "none"
    ),
    "{found}": lambda run: unreadable(teacher_terms, run.teacher_pretrain),
    "--advantage_estimator distill needs --distill_coef: it learns only from the teacher": STATED,
    "--advantage_estimator turn_grpo needs --gamma 1.0: it compares sums of rewards without a"
    " discount": STATED,
    "--use_kl_loss does not support --kl_estimator k1, which is for rewards: as a loss its"
    " gradient is zero on average; use k2, k3 or k3+": STATED,
    "--teacher_pretrain with --teacher_url, which both name a teacher: set only one": STATED,
    "--self_teacher actor needs --teacher_prompt_key: the actor agrees with itself unless it"
    " sees another prompt": STATED,
    "--self_teacher average needs --enable_ema, whose average it is": STATED,
    "--teacher_prompt_key does not support {media_flags}: the teacher's prompt is text": STATED,
    "--distill_top_k does not support --teacher_url: a server does not say the ids of its"
    " likeliest tokens; use --teacher_pretrain or --self_teacher": STATED,
    "--distill_top_k does not support --exact: only the log-probs of sampled tokens are"
    " exact": STATED,
    "--ref_refresh_steps with --ref_ema, which both move the reference: set only one": STATED,
    "--rollout_mask with --use_engine_logprobs, which makes every ratio 1: nothing would be"
    " masked; set only one": STATED,
    "--rollout_correction with --use_engine_logprobs, which makes every ratio 1: nothing"
    " would be corrected; set only one": STATED,
    "--self_teacher {self_teacher} is the teacher: omit --teacher_pretrain and"
    " --teacher_url": lambda run: (
        run.self_teacher != "none" and (run.teacher_pretrain or run.teacher_url)
    ),
    "--teacher_key selects one of several teachers, LABEL=PATH,LABEL=PATH in"
    " --teacher_pretrain: set both, or one teacher": lambda run: (
        (run.teacher_key is not None) != (len(run.teachers) > 1)
    ),
    "--teacher_key and --teacher_prompt_key do not support episodes: programs begin"
    " conversations with prompts that have no columns": lambda run: (
        (run.teacher_key or run.teacher_prompt_key) and has_episodes(run.config.environment)
    ),
    "--distill_top_k compares whole distributions: omit {found}, which leaves out tokens that"
    " the teacher may name": lambda run: (
        " and ".join(_truncations(run)) if run.distill_top_k else ""
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
    "--freezing_actor_steps needs a critic, which nothing else would train: use"
    " --advantage_estimator ppo or gae": lambda run: (
        run.freezing_actor_steps > 0 and not run.has_critic
    ),
    "--advantage_estimator {advantage_estimator} compares the samples of a prompt: set"
    " --n_samples_per_prompt 2 or more": lambda run: (
        run.advantage_estimator in COMPARING and run.n_samples_per_prompt == 1
    ),
    "--pass_k {pass_k} must be between 1 and {n_samples_per_prompt}, because it draws from"
    " --n_samples_per_prompt {n_samples_per_prompt}": lambda run: (
        run.advantage_estimator == "pass_at_k" and not 1 <= run.pass_k <= run.n_samples_per_prompt
    ),
    "--advantage_estimator remax compares with the unshaped reward of the greedy response:"
    " remove {found}": lambda run: _shaping(run, "remax"),
    "--branch_weight episode does not support --loss_agg_mode prompt-mean, which divides by the"
    " tokens of each prompt: use seq-mean-token-mean": STATED,
    "--role_advantage group does not support --advantage_estimator gdpo, which compares each"
    " component of the reward, and each role has its own: omit it": STATED,
    "--advantage_estimator gdpo normalises each reward before the sum, and {found} changes the"
    " sum: remove it, or write it as one of --reward": lambda run: _shaping(run, "gdpo"),
}


# -- the prompts and samples of a step


def _shared_samples(run: RunFacts) -> bool:
    """Return whether several ranks share samples, or an engine."""
    shares_engine = run.engine_tp_size > 1 and not run.rollout_ranks
    return max(run.tp_size, run.sequence_ranks) > 1 or shares_engine


def _against_tail_rounds(run: RunFacts) -> str:
    names = ("partial_rollout", "dynamic_sampling", "curriculum")
    others = " ".join(f"--{name}" for name in names if run[name])
    return others if run.rollout_schedule == "tail_rounds" else ""


def _against_replay(run: RunFacts) -> list[str]:
    others = ("eval_data", "rollout_ranks", "overlap")
    return [name for name in others if run.replay_rollouts and run[name]]


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
    "--max_staleness needs --rollout_ranks: they generate later steps while others learn": STATED,
    "--max_staleness with --partial_rollout: it begins whole groups of later steps; omit one"
    " of them": STATED,
    "--overlap does not support --offload_idle: the models are in device memory while the"
    " engine generates": STATED,
    "--overlap does not support --deterministic: log-probs are computed while the engine"
    " samples, which needs nondeterministic algorithms": STATED,
    "--rollout_schedule tail_rounds needs --over_sampling, such as 1.25: it starts more prompts"
    " than a step needs": STATED,
    "--dynamic_sampling does not support --n_samples_per_prompt 1: it compares the responses to"
    " a prompt": STATED,
    "--dump_rollouts with --replay_rollouts: samples that are read need not be written; omit"
    " one of them": STATED,
    "--max_staleness learns from samples of older weights: set --rollout_correction tis, or"
    " --use_engine_logprobs": lambda run: (
        run.max_staleness > 0 and run.rollout_correction is None and not run.use_engine_logprobs
    ),
    "--overlap needs whole samples on each rank, and an engine on each: omit --tp_size,"
    " --sp_size, --cp_size and --engine_tp_size": lambda run: run.overlap and _shared_samples(run),
    "--max_staleness begins later steps while others learn, and an episode needs its rank"
    " between two turns: omit it": lambda run: (
        run.max_staleness > 0 and has_episodes(run.config.environment)
    ),
    "--partial_rollout continues responses in later steps, but the process of an environment"
    " ends with its step: omit it": lambda run: (
        run.partial_rollout and has_episodes(run.config.environment)
    ),
    "--partial_rollout with --over_sampling continues responses, which can split a text of"
    " --stop: set only one": lambda run: run.partial_rollout and run.over_sampling > 1 and run.stop,
    "--rollout_schedule tail_rounds begins unfinished prompts anew and learns from each once in"
    " a pass over the data: remove {found}": _against_tail_rounds,
    "--dynamic_sampling needs rewards while the engine is awake, and reward models compute"
    " theirs while it sleeps: set only one, or serve the reward model and give the address of"
    " the server as --reward": lambda run: run.dynamic_sampling and bool(run.reward_models),
    "rollout_batch_size {rollout_batch_size} x n_samples_per_prompt {n_samples_per_prompt} ="
    " {num_samples} samples are not a multiple of train_batch_size {train_batch_size}, but"
    " of {found}": _other_batch_size,
    "{media_flags} does not support --router_replay: the experts of media tokens were not"
    " tested": STATED,
    "--videos_key needs --limit_mm_video_per_prompt, for which the engine reserves memory:"
    " its default is 0": STATED,
    "--replay_rollouts has no engine: omit --{found}": _against_replay,
    "prompt_max_len {prompt_max_len} + generate_max_len {generate_max_len} = {found}": _too_small,
}


# -- judged answers, media


PREFERENCE: Rules = {
    "--save_adapter_only with --lora_rank: the trained head of the reward model would be"
    " missing; omit the flag, and the saved model has both": lambda run: (
        run.command in ("train_rm", "train_prm") and run.save_adapter_only and run.lora_rank > 0
    ),
    "--train_batch_size must be at least 2: KTO compares each prompt with the answer to another"
    " one": lambda run: run.command == "train_kto" and run.train_batch_size < 2,
    "--label_smoothing must be below 0.5: above it the rejected answers would be"
    " preferred": lambda run: run.command == "train_dpo" and run.label_smoothing >= 0.5,
    "--label_smoothing needs --dpo_loss sigmoid: {dpo_loss} has no probability to"
    " smooth": lambda run: (
        run.command == "train_dpo" and run.label_smoothing and run.dpo_loss != "sigmoid"
    ),
}

REWARD_MODEL: Rules = {
    "--margin_key needs --rm_loss sigmoid or ties: logexp has no margin": STATED,
    "--tie_key needs --rm_loss ties: the other losses cannot learn from ties": STATED,
    "--head_key needs --reward_heads, the names of the heads": STATED,
    "--reward_heads with several names needs --head_key, the column that names the head of a"
    " row": lambda run: len(run.reward_heads) > 1 and run.head_key is None,
}

MEDIA_RULES: Rules = {
    "--no_freeze_vision_tower needs --images_key, --videos_key or --audios_key: only media"
    " train a tower": lambda run: not run.freeze_vision_tower and not run.media_flags,
    "{media_flags} does not support --teacher_url: the teacher there reads only text; use"
    " --teacher_pretrain": STATED,
    "{media_flags} does not support --aux_loss_coef: its loss counts only text tokens": STATED,
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


def _unusual_layers(run: RunFacts, experts: str, kinds: str) -> str:
    """Return the layers of the model beside attention and feed-forward, with what is said of
    `experts` or of other `kinds`; empty if there are none.

    A model on the hub is checked when it is loaded.
    """
    found = set(run.model_config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if any(run.model_config.get(name) for name in NUM_EXPERTS):
        return f"experts, {experts}"
    return f"layers of type {', '.join(sorted(found))}, {kinds}" if found else ""


STRATEGY: Rules = {
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
    "--ep_size {ep_size} needs --tp_size 1: ranks that split a layer have the same tokens, and"
    " each would send them to the experts once more": STATED,
    "--load_in_4bit needs --lora_rank: matrices in four bits are frozen, and adapters"
    " learn": STATED,
    "--load_in_4bit needs --tp_size 1: matrices in four bits are divided by FSDP2, not"
    " split": STATED,
    "--fp8_training needs --bf16: the products of FP8 with a scale for each row have results in"
    " bfloat16": STATED,
    "--fp8_training needs --lora_rank 0: it is about the gradients of whole matrices, and"
    " adapters freeze them": STATED,
    "--fp8_training needs --tp_size 1: its layers do not support parameters split over"
    " ranks": STATED,
    "--fused_kernels {fused_kernels} needs --tp_size 1: its kernels do not support parameters"
    " split over ranks": STATED,
    "--ep_size {ep_size} does not support {found}": _undivided_experts,
    "--lora_rank with --ep_size needs --target_modules with the names of linear layers, such as"
    " those of the attention: experts have no adapters": lambda run: (
        run.ep_size > 1 and run.lora_rank > 0 and "all-linear" in run.target_modules
    ),
    "--load_in_4bit does not support --pretrain {pretrain}: it has {found}; omit the"
    " flag": lambda run: (
        run.load_in_4bit
        and _unusual_layers(
            run,
            "whose matrices are in one tensor for each layer",
            "whose kernels read the matrices",
        )
    ),
    "--offload_idle with --fsdp_cpu_offload, which leaves nothing to move: set only one of"
    " them": STATED,
}
"""What no strategy can do, on any number of ranks."""

ROUTER_RULES: Rules = {
    "{found}": _unknown_routers,
    "--router_replay needs --engine_type vllm or hf: the routers of SGLang were not tested": STATED,
    "--router_replay needs --speculative none: tokens of rejected drafts choose experts too,"
    " and that was not tested": STATED,
    "--router_replay does not support --replay_rollouts: recorded samples have no experts": STATED,
    "--router_bias_rate needs --lora_rank 0: the engine gets adapters alone, and the reference"
    " is the actor without them, but with the biases": STATED,
}
"""What the routers of mixtures of experts cannot do."""

DEEPSPEED: Rules = {
    "--load_in_4bit needs --fsdp: with DeepSpeed all frozen parameters get the dtype of the"
    " run": STATED,
    "--tp_size needs --fsdp: tensor parallelism is not available with DeepSpeed": STATED,
    "--ep_size needs --fsdp: ZeRO shards every parameter over all ranks, and the experts that"
    " it divides itself are layers of its own, not the model's": STATED,
    "--optimizer muon needs --fsdp: ZeRO flattens parameters before the optimizer gets them,"
    " and matrices have to be whole to be orthogonalised": STATED,
    "--dp_replicate needs --fsdp; with DeepSpeed, --zpg is similar": STATED,
    "--fsdp_cpu_offload needs --fsdp; with ZeRO, use --adam_offload and --param_offload": STATED,
    "--fp8_training needs --fsdp: it was not tested with DeepSpeed": STATED,
    "--zero_stage 0 does not support --bf16, because it has no float32 master weights: use 1, 2"
    " or 3": STATED,
    "--adam_offload does not support --zero_stage 0: use 1, 2 or 3": STATED,
    "--param_offload needs --zero_stage 3": STATED,
    "--zpg needs --zero_stage 3": STATED,
    "--exact needs --fsdp: it was not tested with DeepSpeed": lambda run: (
        run.exact and not run.fsdp and run.command in ("", *PPO)
    ),
}
"""What ZeRO cannot do."""


EXACT_RULES: Rules = {
    "--exact needs --engine_type hf or vllm: {engine_type} computes with kernels of its own,"
    " whose bits differ from the trainer's; `lightrft doctor --exact` names the first part that"
    " differs": STATED,
    "--exact needs --engine_tp_size 1: ranks that share an engine add partial sums": STATED,
    "--exact needs --speculative none: it was not tested with drafts, which are verified by"
    " another sampler": STATED,
    "--exact needs --rollout_quantization none: the trainer computes without quantisation": STATED,
    "--exact needs --tp_size 1: ranks that split a layer add partial sums, and the engine adds"
    " the whole sum in another order": STATED,
    "--exact needs --rollout_ranks 0: it was not tested with engines on other ranks, whose"
    " processors may compute other bits": STATED,
    "--exact needs --lora_rank 0: the engine's products with adapters depend on the number of"
    " rows": STATED,
    "--exact does not support --fp8_training: the engine computes without FP8": STATED,
    "--exact does not support --fused_kernels {fused_kernels}: the engine computes without"
    " these kernels": STATED,
    "--exact does not support {media_flags}: towers and their attention depend on the other"
    " media of a batch": STATED,
    "--exact needs --sp_size 1 and --cp_size 1: ranks that split a sequence exchange heads or"
    " keys, and exact attention reads the blocks of a whole sequence on one rank": lambda run: (
        run.exact and run.sequence_ranks > 1
    ),
    "--exact does not support --pretrain {pretrain}: it has {found}": lambda run: (
        run.exact
        and _unusual_layers(
            run,
            "and the number of rows of an expert's product depends on the other tokens",
            "whose scans divide a sequence by length",
        )
    ),
}
"""What --exact cannot promise, or was not tested with."""

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
    (PPO, EXACT_RULES),
    (SUPERVISED, PREFERENCE),
    (("train_rm",), REWARD_MODEL),
    (TRAINING, MEDIA_RULES),
    (EVERY, STRATEGY),
    (PPO, ROUTER_RULES),
)
"""Commands, and the rules for them.

DEEPSPEED and LAYOUT_RULES depend on the strategy and the sizes.
"""
