"""Find configurations that cannot run: all problems in one message, before any heavy work."""

import json
import os
from collections.abc import Collection
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightrft.config.commands import COMMANDS, PREFERENCES, fields_read
from lightrft.config.errors import ConfigError
from lightrft.config.recipe import algorithm_problems
from lightrft.config.references import (
    ENGINE,
    GGUF,
    JUDGE,
    JUDGE_KEY,
    REWARD_KEY,
    SERVER,
    TRACKERS,
    address_problem,
    data_problems,
    engine_name,
    eval_sources,
    report_names,
    reward_model_terms,
    reward_terms,
)
from lightrft.config.sections import (
    Config,
    ModelSection,
    RewardSection,
    RolloutSection,
    StrategySection,
    field_bounds,
    has_episodes,
    longest_sequence,
    media_columns,
    section_of_field,
)
from lightrft.config.values import COLDEST


def validate(config: Config, *, command: str, world_size: int) -> None:
    """Raise one ConfigError with every impossible combination."""
    problems = _missing_inputs(config, command)
    out_of_range = range_problems(config, fields_read(command))
    problems += out_of_range
    problems += _sampling_problems(config.rollout)

    if "engine" in COMMANDS[command]:
        problems += _speculation_problems(config)
        problems += _engine_media_problems(config)
        problems += _environment_problems(config)
        problems += _window_problems(config)

    if len(config.optim.adam_betas) != 2 or not all(
        0 <= beta < 1 for beta in config.optim.adam_betas
    ):
        problems.append("--adam_betas takes two numbers, at least 0 and below 1")

    if command == "train_ppo":
        problems += algorithm_problems(config)
    if command in PREFERENCES:
        problems += _preference_problems(config, command)
    if config.train.overwrite and config.train.load_checkpoint:
        problems.append(
            "--overwrite starts from the beginning and --load_checkpoint resumes: set only one"
        )

    if command not in ("evaluate", "serve"):
        problems += _media_problems(config, command)
    if not out_of_range:  # sizes divide each other
        problems += _layout_problems(config, world_size) + (
            _batch_problems(config) if command == "train_ppo" else []
        )

    if command == "serve" and not problems and world_size != config.engine.engine_tp_size:
        problems.append(
            f"serve has one engine on all of its processes: set --engine_tp_size {world_size}, or"
            f" start {config.engine.engine_tp_size} processes"
        )

    if problems:
        raise ConfigError(
            "this configuration cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def _missing_inputs(config: Config, command: str) -> list[str]:
    if command == "serve_reward":
        named = config.model.reward_pretrain or config.model.process_reward_pretrain
        return (
            model_problems(config)
            if named
            else ["--reward_pretrain is empty: name the reward model to serve"]
        )

    problems = model_problems(config)
    if not config.model.pretrain:
        problems.insert(
            0, "--pretrain is empty: set it to a Hugging Face folder, a GGUF file or a hub name"
        )

    if command == "serve":
        return problems

    problems += _address_problems(config, command)
    try:
        date.fromisoformat(config.data.chat_template_date or "2000-01-01")
    except ValueError:
        problems.append(
            f"--chat_template_date {config.data.chat_template_date} is not a date such as"
            " 2026-01-31"
        )

    try:
        sources = eval_sources(config.data.eval_data)
    except ValueError as error:
        return [*problems, str(error)]

    if (
        command.startswith("train_")
        and command != "train_ppo"
        and any(each.name for each in sources)
    ):
        problems.append(
            f"--eval_data NAME=SOURCE: {command} computes the loss of one set; give files without"
            " names"
        )

    data_flag = "eval_data" if command == "evaluate" else "prompt_data"
    if not getattr(config.data, data_flag):
        problems.append(
            f"--{data_flag} is empty: set it to a JSONL or parquet file, a folder of them, or a hub"
            " name"
        )

    texts = [("prompt_data", config.data.prompt_data), ("pretrain_data", config.data.pretrain_data)]
    for flag, text in (*texts, *(("eval_data", each.source) for each in sources)):
        probabilities = config.data.prompt_data_probs if flag == "prompt_data" else []
        problems += (
            data_problems(flag, text, probabilities)
            if text and flag in fields_read(command)
            else []
        )

    return problems + (_tracker_problems(config.observe.report_to) if command != "evaluate" else [])


def model_problems(config: Config) -> list[str]:
    """Return the models that are not where the flags say, or named wrongly."""
    problems = []
    models = [
        (name, getattr(config.model, name))
        for name in ("pretrain", "critic_pretrain", "teacher_pretrain")
    ]
    models.append(("draft_pretrain", config.engine.draft_pretrain))

    try:
        models += [(flag, term.name) for flag, term in reward_model_terms(config.model)]
    except ValueError as error:
        problems.append(str(error))

    for name, path in models:
        if len(path) > LONGEST_NAME:
            problems.append(
                f"--{name} {path[:50]}... has {len(path)} letters: no folder and no model of a hub"
                " has such a name"
            )
        elif (
            path.startswith((".", "/", "~"))
            and not os.path.isdir(os.path.expanduser(path))
            and not _is_gguf(path)
        ):
            problems.append(f"--{name} {path}: no such folder")

    return problems


def _is_gguf(path: str) -> bool:
    return path.endswith(GGUF) and os.path.isfile(os.path.expanduser(path))


def _tracker_problems(report_to: str) -> list[str]:
    try:
        names = report_names(report_to)
    except ValueError as error:
        return [str(error)]
    absent = [name for name in names if name in TRACKERS and find_spec(name) is None]
    return [f"--report_to {name} needs the package {name}: pip install {name}" for name in absent]


def _address_problems(config: Config, command: str) -> list[str]:
    problems: list[str] = []
    addresses = (
        [("--teacher_url", config.model.teacher_url, "TEACHER_API_KEY")]
        if command == "train_ppo"
        else []
    )

    if "reward" in COMMANDS[command]:
        try:
            names = [term.name for term in reward_terms(config.reward.reward)]
        except ValueError as error:
            return [str(error)]
        addresses += [("--reward", name, REWARD_KEY) for name in names if name.startswith(SERVER)]
        if JUDGE in names:
            if config.reward.judge_url != ENGINE:
                addresses.append(("--judge_url", config.reward.judge_url, JUDGE_KEY))
            problems = _judge_problems(config.reward)

    return problems + [
        problem
        for flag, url, key in addresses
        if url and (problem := address_problem(flag, url, key))
    ]


def _judge_problems(reward: RewardSection) -> list[str]:
    needed = ("judge_url",) if reward.judge_url == ENGINE else ("judge_url", "judge_model")
    problems = [f"--reward judge needs --{name}" for name in needed if not getattr(reward, name)]
    if len(reward.judge_range) != 2 or reward.judge_range[0] >= reward.judge_range[1]:
        problems.append("--judge_range takes two numbers, the lowest and the highest score")
    return problems


def range_problems(config: Config, read: Collection[str]) -> list[str]:
    """Return the fields among `read` whose values are out of their range."""
    owners = section_of_field()
    problems = []
    for name, bound in field_bounds().items():
        value = getattr(getattr(config, owners[name]), name)
        if name in read and value is not None and (problem := bound.problem(value)):
            problems.append(f"--{name} {problem}")
    return problems


def _sampling_problems(rollout: RolloutSection) -> list[str]:
    first = rollout.first_token_temperature
    impossible = {
        "--temperature must be above 0; evaluation is always greedy": rollout.temperature <= 0,
        f"--temperature, --eval_temperature and --first_token_temperature must be at least {COLDEST:g}": any(
            value is not None and 0 < value < COLDEST
            for value in (rollout.temperature, rollout.eval_temperature, first)
        ),
        "--eval_temperature must be above 0; evaluation always includes a greedy response": (
            rollout.eval_temperature is not None and rollout.eval_temperature <= 0
        ),
        "--top_p must be above 0 and at most 1; 1 samples from all tokens": (
            not 0 < rollout.top_p <= 1
        ),
        "--top_k must not be negative; 0 samples from all tokens": rollout.top_k < 0,
        "--stop must not contain an empty text": "" in rollout.stop,
        "--stop_token_ids must not contain a negative number": any(
            token < 0 for token in rollout.stop_token_ids
        ),
        f"--min_tokens {rollout.min_tokens} exceeds --generate_max_len {rollout.generate_max_len}": (
            rollout.min_tokens > rollout.generate_max_len
        ),
        "--min_tokens excludes tokens that end a response, and not texts: use --stop_token_ids instead of --stop": (
            rollout.min_tokens > 0 and bool(rollout.stop)
        ),
        "--first_token_temperature must be above 0; omit it to use --temperature": (
            first is not None and first <= 0
        ),
    }

    return [problem for problem, holds in impossible.items() if holds]


def _preference_problems(config: Config, command: str) -> list[str]:
    """Return the settings that training on judged answers cannot use, each with the solution."""
    section = config.preference
    heads = config.preference.reward_heads
    impossible = {}

    if command in ("train_rm", "train_prm"):
        impossible |= {
            "--save_adapter_only would omit the trained head of the reward model; omit the flag, and the saved model has both": (
                config.train.save_adapter_only and config.model.lora_rank > 0
            ),
        }

    if command == "train_rm":
        impossible |= {
            "--margin_key needs --rm_loss sigmoid or ties: logexp has no margin": (
                section.rm_loss == "logexp" and section.margin_key is not None
            ),
            "--tie_key needs --rm_loss ties: the other losses cannot learn from ties": (
                section.rm_loss != "ties" and section.tie_key is not None
            ),
            "--head_key needs the names of the heads: set --reward_heads": (
                section.head_key is not None and not heads
            ),
            "--reward_heads with several names needs --head_key, the column that names the head of a row": (
                len(heads) > 1 and section.head_key is None
            ),
            "--reward_heads contains a name twice": len(set(heads)) < len(heads),
        }

    if command == "train_kto":
        impossible |= {
            "--train_batch_size must be at least 2: KTO compares each prompt with the answer to another one": (
                config.train.train_batch_size < 2
            ),
        }

    if command == "train_dpo":
        impossible |= {
            "--label_smoothing must be below 0.5: above it the rejected answers would be preferred": (
                section.label_smoothing >= 0.5
            ),
            f"--label_smoothing needs --dpo_loss sigmoid: {section.dpo_loss} has no probability to smooth": (
                section.label_smoothing > 0 and section.dpo_loss != "sigmoid"
            ),
        }

    return [problem for problem, holds in impossible.items() if holds]


def _media_problems(config: Config, command: str) -> list[str]:
    """Return the settings that cannot learn from images, videos or sound, each with the reason."""
    model = config.model
    algorithm = config.algorithm
    if not (flags := _media_flags(config)):
        needed = "--images_key, --videos_key or --audios_key: only media train a tower"
        return [] if model.freeze_vision_tower else [f"--no_freeze_vision_tower needs {needed}"]

    impossible = {
        f"{flags}: the teacher at --teacher_url reads only text; use --teacher_pretrain": bool(
            model.teacher_url
        ),
        f"{flags} does not support --aux_loss_coef: its loss counts only text tokens": (
            algorithm.aux_loss_coef > 0
        ),
        "--videos_key: set --limit_mm_video_per_prompt, for which the engine reserves memory; its default is 0": (
            command == "train_ppo"
            and bool(config.data.videos_key)
            and config.engine.limit_mm_video_per_prompt == 0
        ),
    }
    return [problem for problem, holds in impossible.items() if holds]


def _engine_media_problems(config: Config) -> list[str]:
    """Return the media that the engine cannot be given, with the reason."""
    if engine_name(config.engine) != "sglang":
        return []

    reasons = {
        "videos": "requests with videos never ended in SGLang on a CPU",
        "audios": "sound was not tested in SGLang",
    }
    return [
        f"--{medium}_key needs --engine_type vllm or hf: {reasons[medium]}"
        for medium in media_columns(config.data)
        if medium in reasons
    ]


def _media_flags(config: Config) -> str:
    return " ".join(f"--{medium}_key" for medium in media_columns(config.data))


def _speculation_problems(config: Config) -> list[str]:
    """Return the settings of --speculative that contradict the engine, the model, or each other."""
    engine = engine_name(config.engine)
    speculative = config.engine.speculative
    draft = config.engine.draft_pretrain
    reads_draft = speculative in ("draft", "eagle3")

    problems = []
    if speculative != "none" and engine != "vllm":
        problems.append(
            f"--speculative {speculative} needs --engine_type vllm; {engine} generates without"
            " drafts"
        )

    if reads_draft and not draft:
        model = (
            "a small model with the vocabulary of --pretrain"
            if speculative == "draft"
            else "an EAGLE-3 head for --pretrain"
        )
        problems.append(
            f"--speculative {speculative} needs --draft_pretrain, {model}; --speculative group"
            " needs no other model"
        )

    if draft and not reads_draft:
        problems.append(
            f"--draft_pretrain {draft} is used by --speculative draft or eagle3, not by"
            f" --speculative {speculative}"
        )

    if config.optim.draft_learning_rate > 0 and speculative != "draft":
        problems.append(
            "--draft_learning_rate trains the model of --speculative draft, and --speculative is"
            f" {speculative}"
        )

    if config.optim.draft_learning_rate > 0 and (flags := _media_flags(config)):
        problems.append(
            f"{flags}: --draft_learning_rate trains a model of text, which reads no media; omit one"
            " of them"
        )

    if speculative == "mtp" and _num_mtp_layers(config.model.pretrain) == 0:
        problems.append(
            f"--speculative mtp: {config.model.pretrain} has no layers for it; --speculative group"
            " needs none"
        )

    own, others = (_text_config(name).get("vocab_size") for name in (config.model.pretrain, draft))
    if speculative == "draft" and own and others and own != others:
        problems.append(
            f"--draft_pretrain {draft} has a vocabulary of {others} tokens, and --pretrain "
            f"{config.model.pretrain} of {own}: both need the same vocabulary"
        )

    return problems


def _environment_problems(config: Config) -> list[str]:
    section = config.environment
    problems = []
    try:
        names = [term.name for term in reward_terms(config.reward.reward)]
    except ValueError:  # _address_problems() says it
        names = []

    if "environment" in names and not (section.environment or section.agent):
        problems.append(
            "--reward environment is the reward of an environment or an agent: set --environment or"
            " --agent"
        )

    if section.agent and (section.environment or section.tools):
        problems.append(
            "--agent has its own tools and its own environment: omit --environment and --tools"
        )

    if has_episodes(section) and (flags := _media_flags(config)):
        problems.append(
            f"{flags}: --environment, --agent and --tools need prompts of text, since the tokens of"
            " their turns and observations are not expanded for media"
        )

    if section.tools and not config.data.apply_chat_template:
        problems.append(
            "--tools are described to the model by its chat template: set --apply_chat_template"
        )

    return problems


def _layout_problems(config: Config, world_size: int) -> list[str]:
    engine_tp = config.engine.engine_tp_size
    strategy = config.strategy
    replicate = strategy.dp_replicate
    sp = max(strategy.sp_size, strategy.cp_size)
    tp = strategy.tp_size
    ulysses = strategy.cp_size == 1 and strategy.sp_impl != "zigzag"

    problems = strategy_problems(config)
    rollout_ranks = config.rollout.rollout_ranks
    if rollout_ranks >= world_size:
        return [
            *problems,
            (
                f"--rollout_ranks {rollout_ranks} leaves none of the {world_size} processes for"
                " training"
            ),
        ]

    generating = rollout_ranks or world_size
    world_size = world_size - rollout_ranks
    if generating % engine_tp:
        problems.append(
            f"--engine_tp_size {engine_tp} does not divide the {generating} processes that generate"
        )

    if world_size % (replicate * sp * tp):
        named = (
            ("dp_replicate", replicate),
            ("cp_size" if strategy.cp_size > 1 else "sp_size", sp),
            ("tp_size", tp),
        )
        sizes = [f"--{name} {size}" for name, size in named if size > 1]
        problems.append(f"{' x '.join(sizes)} does not divide the {world_size} processes")

    if strategy.strategy == "deepspeed":
        if world_size % strategy.zpg:
            problems.append(f"--zpg {strategy.zpg} does not divide the {world_size} processes")
        problems += deepspeed_problems(strategy, bf16=config.model.bf16)

    counts = _heads(config.model.pretrain) if sp * tp > 1 else {}
    problems += [
        f"--tp_size {tp} does not divide the model's {n} {heads}"
        for heads, n in counts.items()
        if n % tp
    ]

    heads = counts.get("attention heads", 0)
    if ulysses and heads % tp == 0 and heads // tp % sp:
        each = (
            f"{heads} attention heads"
            if tp == 1
            else f"{heads // tp} attention heads on each rank of --tp_size {tp}"
        )
        problems.append(
            f"--sp_size {sp} does not divide the model's {each}; --sp_impl zigzag has no such"
            " condition"
        )

    return problems


def strategy_problems(config: Config) -> list[str]:
    """Return the settings that no strategy can use, on any number of ranks."""
    strategy = config.strategy
    tp = config.strategy.tp_size
    problems = (
        cp_problems(strategy)
        + lora_problems(config.model, tp_size=tp)
        + fused_problems(config.model, tp_size=tp)
    )

    if strategy.offload_idle and strategy.fsdp_cpu_offload:
        problems.append(
            "--offload_idle has nothing to move with --fsdp_cpu_offload: set only one of them"
        )

    return problems


def cp_problems(section: StrategySection) -> list[str]:
    """Return the flags that contradict --cp_size and its meaning."""
    short = section.cp_size
    others = {"sp_size": (1, section.cp_size), "sp_impl": ("auto", "zigzag")}
    wrong = [
        f"--{name} {getattr(section, name)}"
        for name, agreeing in others.items()
        if getattr(section, name) not in agreeing
    ]
    if short == 1 or not wrong:
        return []

    return [
        f"--cp_size {short} is short for --sp_size {short} --sp_impl zigzag and contradicts"
        f" {' '.join(wrong)}: set only one"
    ]


def fused_problems(model: ModelSection, *, tp_size: int) -> list[str]:
    """Return the settings that are incompatible with --fused_kernels, each with the solution."""
    if model.fused_kernels == "none":
        return []

    impossible = {
        f"--fused_kernels {model.fused_kernels} needs --tp_size 1: its kernels do not support parameters split over ranks": (
            tp_size > 1
        ),
        # The rotary kernel overwrites results of products, which selective recomputation would use
        # once more.
        f"--fused_kernels {model.fused_kernels} needs --gradient_checkpointing_policy full: it writes into results that selective would keep": (
            model.gradient_checkpointing and model.gradient_checkpointing_policy == "selective"
        ),
    }
    return [problem for problem, holds in impossible.items() if holds]


def lora_problems(model: ModelSection, *, tp_size: int) -> list[str]:
    """Return the problems of a ModelSection's adapters, each with the solution."""
    impossible = {
        "--lora_rank must not be negative; 0 trains the model itself": model.lora_rank < 0,
        "--lora_alpha must be above 0": model.lora_alpha <= 0,
        "--lora_dropout must be at least 0 and below 1": not 0 <= model.lora_dropout < 1,
        "--target_modules is empty: name linear layers, or use all-linear": (
            not model.target_modules
        ),
        "--target_modules takes either all-linear or names": (
            "all-linear" in model.target_modules[1:] + model.target_modules[:-1]
        ),
        "--lora_rank needs --tp_size 1: adapters are not split over ranks; --fsdp shards the model without it": (
            model.lora_rank > 0 and tp_size > 1
        ),
    }
    return [problem for problem, holds in impossible.items() if holds]


def deepspeed_problems(strategy: Any, *, bf16: bool) -> list[str]:
    """Return the settings of a StrategySection that ZeRO does not support, each with the
    solution.
    """
    stage = strategy.zero_stage
    impossible = {
        "--tp_size needs --fsdp: tensor parallelism is not available with DeepSpeed": (
            strategy.tp_size > 1
        ),
        "--dp_replicate needs --fsdp; with DeepSpeed, --zpg is similar": strategy.dp_replicate > 1,
        "--fsdp_cpu_offload needs --fsdp; with ZeRO, use --adam_offload and --param_offload": (
            strategy.fsdp_cpu_offload
        ),
        "--zero_stage 0 does not support --bf16, because it has no float32 master weights: use 1, 2 or 3": (
            bf16 and stage == 0
        ),
        "--adam_offload needs --zero_stage 1, 2 or 3": strategy.adam_offload and stage == 0,
        "--param_offload needs --zero_stage 3": strategy.param_offload and stage < 3,
        "--zpg needs --zero_stage 3": strategy.zpg > 1 and stage < 3,
    }

    return [problem for problem, holds in impossible.items() if holds]


def _heads(pretrain: str) -> dict[str, int]:
    """Return the counts that --tp_size and Ulysses must divide, from a local folder; a hub model is
    checked when loaded.
    """
    content = _text_config(pretrain)
    heads = content.get("num_attention_heads")
    counts = {
        "attention heads": heads,
        "key-value heads": content.get("num_key_value_heads", heads),
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _text_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model's text part; empty for a hub model, whose files are not
    here yet.
    """
    file = Path(name).expanduser() / "config.json"
    if not name or not os.path.isfile(file):
        return {}
    content = _object(file)
    return content.get("text_config", content)


def _object(file: Path) -> dict[str, Any]:
    """Return the content of a model's configuration; an empty one if it has none, which is reported
    when the model is loaded."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


LONGEST_NAME = 1000
"""Number of letters of the path or name of a model."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of a model's configuration with the number of its layers that predict several tokens."""


def _window_problems(config: Config) -> list[str]:
    """Return a problem if the engine would be asked for longer sequences than the model has
    positions for.

    A model in a local folder whose positions are scaled is left to the engine.
    """
    content = _text_config(config.model.pretrain)
    window = content.get("max_position_embeddings")
    longest = longest_sequence(config)
    scaled = content.get("rope_scaling") or len(content.get("rope_parameters") or {}) > len(
        UNSCALED
    )

    if (
        engine_name(config.engine) == "hf"
        or not isinstance(window, int)
        or scaled
        or longest <= window
    ):
        return []

    lengths = (
        f"--prompt_max_len {config.data.prompt_max_len} + --generate_max_len"
        f" {config.rollout.generate_max_len}"
    )
    return [
        f"{lengths} make sequences of up to {longest} tokens, and --pretrain"
        f" {config.model.pretrain} has {window} positions"
    ]


UNSCALED = ("rope_type", "rope_theta")
"""Rope parameters of a model that does not scale its positions."""


def _num_mtp_layers(pretrain: str) -> int | None:
    """Return the number of layers that predict several tokens; None for a hub model, which vLLM
    checks when it loads it.
    """
    file = Path(pretrain).expanduser() / "config.json"
    if not os.path.isfile(file):
        return None
    content = _object(file)
    parts = content, content.get("text_config", {})
    return max(part.get(name) or 0 for part in parts for name in MTP_LAYERS)


def _batch_problems(config: Config) -> list[str]:
    rollout = config.rollout
    train = config.train

    problems = []
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if samples % train.train_batch_size:
        problems.append(
            f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt"
            f" {rollout.n_samples_per_prompt} = {samples} samples are not a multiple of"
            f" train_batch_size {train.train_batch_size}"
        )

    if rollout.replay_rollouts:
        others = {
            "--eval_data": config.data.eval_data,
            "--rollout_ranks": rollout.rollout_ranks,
            "--overlap": rollout.overlap,
        }
        problems += [
            f"--replay_rollouts has no engine: omit {flag}"
            for flag, value in others.items()
            if value
        ]

        if rollout.dump_rollouts:
            problems.append(
                "--dump_rollouts and --replay_rollouts: samples that are read need not be written;"
                " omit one of them"
            )

    longest = config.data.prompt_max_len + rollout.generate_max_len
    for name in ("max_tokens_per_microbatch", "max_tokens_per_logprob_microbatch"):
        limit = getattr(train, name)
        if limit is not None and longest > limit:
            problems.append(
                f"prompt_max_len {config.data.prompt_max_len} + generate_max_len"
                f" {rollout.generate_max_len} = {longest} tokens do not fit into {name} {limit}"
            )

    return problems
