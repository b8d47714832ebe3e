"""Every knob: typed sections, each field one flat command-line flag and one key of a YAML file.

    torchrun -m lightrft.cli.train_ppo --config configs/quickstart.yaml --actor_learning_rate 1e-3

The file gives defaults, flags override it. The text under a field is its help.
"""

import ast
import inspect
import json
import os
import sys
import textwrap
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser


class ConfigError(ValueError):
    """The user's configuration cannot work; the message says why and the way out."""


@dataclass
class ModelSection:
    pretrain: str = ""
    """Model to start from: a Hugging Face folder or hub name."""
    bf16: bool = False
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal["full", "selective"] = "full"
    """What stays of each block: full keeps its input, selective also the results of attention and matrix products."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    lora_rank: int = 0
    """Train adapters of this rank beside the frozen model (LoRA); 0: train the model itself."""
    lora_alpha: float = 16.0
    """What an adapter adds is multiplied with lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is left out in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names, or ends of names, of the linear layers that get adapters; all-linear: all but the output layer."""
    freeze_prefix: list[str] = field(default_factory=list)
    """Beginnings of the names of parameters that are not trained; with lora_rank they get no adapters."""


@dataclass
class DataSection:
    prompt_data: str = ""
    """Training data: a JSONL, JSON or parquet file, a folder of them, or a hub name."""
    prompt_split: str = "train"
    """Split of the training data."""
    eval_data: str = ""
    """Held-out data, in the same form; empty: no evaluation."""
    eval_split: str = "test"
    """Split of the held-out data."""
    input_key: str = "input"
    """Column of the prompt: a string, or a list of chat messages."""
    label_key: str = "label"
    """Column of the right answer: rewards receive it as `label`, SFT learns it."""
    input_template: str | None = None
    """Text around the prompt, with one {}: `Question: {}\\nAnswer: `."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message of the chat template."""
    prompt_max_len: int = 1024
    """Longest prompt in tokens; longer ones are bad rows."""
    max_samples: int | None = None
    """Use only the first so many rows of the training data."""
    max_eval_samples: int | None = None
    """Use only the first so many rows of the held-out data."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with a malformed or too long row: stop with file and line, or skip it and report the count."""


@dataclass
class StrategySection:
    fsdp: bool = False
    """Shard with FSDP2; otherwise DeepSpeed ZeRO."""
    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer in host memory, move shards in when used."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO cuts over the ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zpg: int = 1
    """ZeRO-3: so many consecutive ranks, those of a node, hold the parameters once more, and gather them among themselves."""
    adam_offload: bool = False
    """ZeRO: optimizer states live in host memory and the update runs there."""
    param_offload: bool = False
    """ZeRO-3: parameters live in host memory and come layer by layer."""
    overlap_comm: bool = False
    """ZeRO: sum gradients while the backward pass still runs; takes more memory."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """ZeRO with --bf16: dtype in which gradients are summed over micro-batches and ranks."""
    offload_idle: bool = False
    """Keep in device memory only what the moment needs; idle models and optimizers wait in host memory."""
    dp_replicate: int = 1
    """Hybrid sharding: so many replicas, each sharded over the other data ranks."""
    tp_size: int = 1
    """Tensor parallelism: so many consecutive ranks split each layer of the trained models and share their data."""
    tp_sequence_parallel: bool = False
    """Between attention and feed-forward, each of the --tp_size ranks keeps a part of the tokens: less memory, same traffic."""
    sp_size: int = 1
    """Sequence parallelism: so many ranks divide the tokens of each micro-batch of the trained models and share their data."""
    sp_impl: Literal["auto", "ulysses", "zigzag"] = "auto"
    """How attention sees the others' tokens: ulysses exchanges them for heads, zigzag gathers keys and values. auto: ulysses."""
    cp_size: int = 1
    """Context parallelism: the short form of --sp_size N --sp_impl zigzag."""
    timeout_minutes: float = 60.0
    """A collective that waits longer ends the run; every rank then logs which ranks are late, and where all of them are."""


@dataclass
class EngineSection:
    engine_type: Literal["auto", "vllm", "hf"] = "auto"
    """Generation engine; auto: vllm when installed, else hf (transformers)."""
    engine_tp_size: int = 1
    """Consecutive ranks that share one engine's weights."""
    engine_mem_util: float = 0.6
    """Share of an accelerator's memory that vLLM may take while awake."""
    engine_kv_cache_gb: float = 1.0
    """Size of vLLM's key-value cache on a CPU, in GB."""
    enable_engine_sleep: bool = True
    """Put the engine to sleep while training, so that both fit on one device."""
    engine_sleep_level: Literal[1, 2] = 2
    """1 keeps the sleeping engine's weights in host memory; 2 drops them, they are streamed in again anyway."""
    engine_enforce_eager: bool = False
    """Run vLLM without CUDA graphs; always so on a CPU."""
    micro_rollout_batch_size: int = 64
    """Prompts that the hf engine generates at once."""
    weight_sync_bucket_mb: int = 512
    """Size of one bucket of the weight stream; the peak extra memory is about two of them."""


@dataclass
class RolloutSection:
    rollout_batch_size: int = 128
    """Prompts of one step, over all ranks."""
    n_samples_per_prompt: int = 8
    """Responses sampled for each prompt: the group."""
    generate_max_len: int = 1024
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at it everywhere."""


@dataclass
class RewardSection:
    reward: str = "exact_match"
    """Reward function: a name, module:function or file.py:function."""
    overlong_buffer: bool = False
    """Lower the reward of a response whose length comes near generate_max_len."""
    overlong_buffer_len: int = 4096
    """The penalty begins so many tokens before generate_max_len and grows linearly."""
    overlong_buffer_penalty_factor: float = 1.0
    """The penalty at generate_max_len."""
    reward_running_norm: bool = False
    """Divide rewards by the standard deviation of all rewards of the run so far."""
    reward_running_norm_minus_mean: bool = False
    """Subtract the mean of all rewards of the run before that."""
    reward_clip: float | None = None
    """Clip rewards to plus and minus this, after the steps above."""
    reward_group_norm: bool = False
    """Standardise rewards in each group, whatever the estimator does with them."""


@dataclass
class AlgorithmSection:
    advantage_estimator: str = "grpo"
    """Estimator, and the recipe that goes with it: a name, module:function or file.py:function."""
    policy_loss: str = "ppo"
    """Loss of one token: a name, module:function or file.py:function."""
    eps_clip_low: float = 0.2
    """The ratio is clipped below at 1 - eps_clip_low."""
    eps_clip_high: float = 0.2
    """The ratio is clipped above at 1 + eps_clip_high."""
    eps_clip: float | None = None
    """Both bounds of the ratio at once."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most -dual_clip times the advantage (3 in the paper)."""
    sapo_tau_positive: float = 1.0
    """How fast sapo's gate closes for positive advantages."""
    sapo_tau_negative: float = 1.05
    """How fast sapo's gate closes for negative advantages."""
    policy_drift_coef: float = 0.01
    """Coefficient of cpgd's divergence from the policy before the step."""
    cov_ratio: float = 2e-4
    """Share of an optimizer step's tokens, of high covariance of log-prob and advantage, that kl_cov and clip_cov single out."""
    kl_cov_coef: float = 1.0
    """What kl_cov adds for each of those tokens: so many times |log ratio|."""
    clip_cov_range: list[float] = field(default_factory=lambda: [1.0, 5.0])
    """clip_cov leaves out tokens whose covariance is between these two."""
    high_entropy_token_ratio: float = 0.0
    """Learn only from this share of an optimizer step's tokens, those of the highest entropy (0.2 in the paper); 0: from all."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    rollout_correction: str | None = None
    """Weigh tokens with p_trainer / p_engine: tis, mis, icepop, module:function or file.py:function."""
    rollout_correction_level: Literal["token", "sequence", "geometric"] = "token"
    """That ratio of each token, the product over its sequence, or the geometric mean."""
    rollout_correction_low: float = 0.5
    """Ratios below this are masked."""
    rollout_correction_high: float = 2.0
    """Ratios above this are truncated or masked."""
    use_engine_logprobs: bool = False
    """Take the engine's log-probs as those before the step: one forward pass less, and the clip measures from the engine."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number, always over all ranks and micro-batches of an optimizer step."""
    gamma: float = 1.0
    """Discount of rewards per token."""
    pass_k: int = 4
    """Draws of the estimator pass_at_k."""
    advantages_norm: bool = False
    """Normalise advantages to mean 0 and deviation 1 over all learned tokens of the step."""
    advantage_clip: float | None = None
    """Clip advantages to plus and minus this, after the normalisation."""
    mask_truncated: bool = False
    """Do not learn from responses that were cut at generate_max_len; their rewards still count for their group."""
    length_filter: list[int] = field(default_factory=list)
    """Learn only from responses of at least and at most so many tokens: two numbers."""
    difficulty_filter: list[float] = field(default_factory=list)
    """Learn only from groups of whose responses at least and at most this share is right (a reward above 0.5): two numbers."""
    entropy_filter: list[float] = field(default_factory=list)
    """Learn only from responses whose tokens have a mean entropy between these two, in nats."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss; otherwise it is taken off the reward of each token."""
    init_kl_coef: float = 0.0
    """Coefficient of that divergence; 0 without use_kl_loss: there is no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator: k1 is unbiased, k2 has the right gradient, k3 is unbiased and positive, k3+ is k3 with the gradient of k2."""
    kl_target: float | None = None
    """Move the coefficient so that the divergence per token comes near this."""
    kl_horizon: int = 10000
    """How slowly it moves: in so many samples by a fifth at most."""


@dataclass
class OptimSection:
    actor_learning_rate: float = 1e-6
    """Peak learning rate."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic, where there is one."""
    lr_scheduler: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to 10 % of the peak, or constant."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps spent warming up."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    l2: float = 0.0
    """Weight decay, on matrices only (not on norms and biases)."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""


@dataclass
class TrainSection:
    seed: int = 42
    """Seed of everything random."""
    num_episodes: int = 1
    """Passes over the prompt data."""
    max_steps: int | None = None
    """Stop after so many steps, whatever num_episodes says."""
    max_epochs: int = 1
    """Passes over each step's samples."""
    train_batch_size: int = 1024
    """Samples of one optimizer step, over all ranks."""
    micro_train_batch_size: int | None = None
    """Most sequences of one forward and backward pass on one rank; unset: max_tokens_per_microbatch alone decides."""
    max_tokens_per_microbatch: int = 16384
    """Most tokens of one forward and backward pass on one rank; --sp_size ranks divide so many among them."""
    batching: Literal["packed", "dynamic", "plain"] = "packed"
    """Which sequences meet in one pass: any, so that all ranks finish together; similar lengths; or those next in order."""
    enable_ema: bool = False
    """Keep a moving average of the actor's parameters, one more step of it after each step, and save it too: model_ema."""
    ema_beta: float = 0.992
    """What the average keeps of itself at each step."""
    save_path: str = "runs/run"
    """Folder of the run: final model, metrics, report, resolved configuration."""
    ckpt_path: str | None = None
    """Folder of the checkpoints; save_path/checkpoints when unset."""
    save_steps: int = -1
    """Write a checkpoint every so many steps; -1: never."""
    max_ckpt_num: int = 3
    """Keep so many checkpoints."""
    max_ckpt_mem: float = 1000.0
    """Keep at most so many GB of checkpoints; the newest always stays."""
    save_hf_ckpt: bool = False
    """Beside each checkpoint, in its folder `hf`, the model as from_pretrained and engines load it."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory."""
    save_adapter_only: bool = False
    """With lora_rank: the final model is the adapter alone in peft's format, not the model with the adapter merged into it."""
    load_checkpoint: bool = False
    """Continue from the newest complete checkpoint; start afresh when there is none."""
    stop_loss: float | None = None
    """SFT ends once a step's loss is below this."""
    eval_steps: int = -1
    """Evaluate on eval_data every so many steps; -1: never."""


@dataclass
class ObserveSection:
    logging_steps: int = 1
    """Report metrics every so many steps."""
    use_tensorboard: bool = True
    """Write TensorBoard files to save_path/tensorboard."""
    use_wandb: bool = False
    """Send metrics to Weights & Biases."""
    wandb_project: str = "lightrft"
    """Project there."""
    wandb_run_name: str | None = None
    """Name of the run there."""
    num_trajectories_to_save: int = 8
    """Samples of each step written to save_path/samples.jsonl; 0: none."""


@dataclass
class Config:
    """The whole configuration of a run, one section per concern."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    strategy: StrategySection = field(default_factory=StrategySection)
    engine: EngineSection = field(default_factory=EngineSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    reward: RewardSection = field(default_factory=RewardSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)
    observe: ObserveSection = field(default_factory=ObserveSection)

    def expand(self, recipe: dict[str, Any], written: set[str]) -> None:
        """Set the fields of a recipe, except those that the user wrote."""
        owners = section_of_field()
        for name, value in recipe.items():
            if name not in written:
                setattr(getattr(self, owners[name]), name, value)

    def write(self, path: Path) -> None:
        """The resolved configuration, readable by `--config`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


SECTIONS: dict[str, type] = {section.name: section.default_factory for section in fields(Config)}


def section_of_field() -> dict[str, str]:
    """Field name -> section name. Names are unique over all sections, so a flag needs no prefix."""
    return {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}


def parse(argv: list[str] | None = None, description: str = "") -> tuple[Config, set[str]]:
    """Configuration from `--config file.yaml` and flags, and the names of the fields that the user wrote."""
    argv = list(sys.argv[1:] if argv is None else argv)
    files, flags = _split_config_flag(argv)
    arguments = [token for file in files for token in _arguments_of_file(file)] + flags
    parser = _Parser(list(SECTIONS.values()), description=description, allow_abbrev=False)
    documentation = {name: text for cls in SECTIONS.values() for name, text in field_docs(cls).items()}
    for action in parser._actions:
        action.help = documentation.get(action.dest, action.help).replace("%", "%%")
    _check_flag_names(arguments, set(parser._option_string_actions))
    *sections, stray = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if stray:
        raise ConfigError(f"unexpected {' '.join(stray)}: every value follows its --flag. All flags: --help")
    written = {token[2:].split("=")[0] for token in arguments if token.startswith("--")}
    written = {name.removeprefix("no_") if name not in documentation else name for name in written}
    return Config(**dict(zip(SECTIONS, sections, strict=True))), written


COUNTS = (
    *("rollout_batch_size", "n_samples_per_prompt", "generate_max_len", "prompt_max_len", "train_batch_size", "max_epochs"),
    *("num_episodes", "max_tokens_per_microbatch", "logging_steps", "max_ckpt_num", "weight_sync_bucket_mb"),
    *("micro_rollout_batch_size", "engine_tp_size", "dp_replicate", "sp_size", "cp_size", "tp_size"),
)
"""Fields that count things and cannot be 0."""


def validate(config: Config, *, door: str, world_size: int) -> None:
    """Raise one ConfigError that names every impossible combination."""
    problems = _missing_inputs(config, door)
    owners = section_of_field()
    problems += [f"--{name} must be at least 1" for name in COUNTS if getattr(getattr(config, owners[name]), name) < 1]
    if config.rollout.temperature <= 0:
        problems.append("--temperature must be above 0; evaluation is greedy by itself")
    if len(config.optim.adam_betas) != 2:
        problems.append("--adam_betas takes two numbers")
    if door == "train_ppo":
        problems += _algorithm_problems(config)
    if not problems:
        problems += _layout_problems(config, world_size)
    if not problems and door == "train_ppo":
        problems += _batch_problems(config)
    if problems:
        raise ConfigError("this configuration cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems))


def flags_without_effect(config: Config, written: set[str], door: str) -> list[str]:
    """What the user wrote that changes nothing in this run, each with the reason."""
    owners = section_of_field()
    used = DOORS[door]
    training = {f.name for f in fields(RewardSection)} - {"reward"} | {"lora_rank", *LORA, "freeze_prefix"}
    idle = {name for name, section in owners.items() if section not in used} | (training if door == "evaluate" else set())
    unused = [f"--{name} has no effect in {door}" for name in sorted(written & idle)]
    conditional = {
        "gradient_checkpointing_policy": (config.model.gradient_checkpointing, "--gradient_checkpointing"),
        "kl_estimator": (needs_reference(config.algorithm), "--init_kl_coef"),
        "kl_target": (config.algorithm.init_kl_coef > 0, "--init_kl_coef"),
        "kl_horizon": (config.algorithm.kl_target is not None, "--kl_target"),
        "rollout_correction_level": (bool(config.algorithm.rollout_correction), "--rollout_correction"),
        "rollout_correction_low": (bool(config.algorithm.rollout_correction), "--rollout_correction"),
        "rollout_correction_high": (bool(config.algorithm.rollout_correction), "--rollout_correction"),
        "overlong_buffer_len": (config.reward.overlong_buffer, "--overlong_buffer"),
        "overlong_buffer_penalty_factor": (config.reward.overlong_buffer, "--overlong_buffer"),
        "reward_running_norm_minus_mean": (config.reward.reward_running_norm, "--reward_running_norm"),
        "engine_sleep_level": (config.engine.enable_engine_sleep, "--enable_engine_sleep"),
        "eval_steps": (bool(config.data.eval_data), "--eval_data"),
        "wandb_project": (config.observe.use_wandb, "--use_wandb"),
        "wandb_run_name": (config.observe.use_wandb, "--use_wandb"),
        "stop_loss": (door == "train_sft", "train_sft"),
        "tp_sequence_parallel": (config.strategy.tp_size > 1, "--tp_size"),
        "sp_impl": (config.strategy.sp_size > 1 or config.strategy.cp_size > 1, "--sp_size"),
        "grad_accum_dtype": (config.model.bf16, "--bf16"),
        "ema_beta": (config.train.enable_ema, "--enable_ema"),
        "system_prompt": (config.data.apply_chat_template, "--apply_chat_template"),
        **{name: (config.model.lora_rank > 0, "--lora_rank") for name in (*LORA, "save_adapter_only")},
    }
    unused += [f"--{name} has no effect without {needs}" for name, (active, needs) in conditional.items()
               if name in written and not active and owners[name] in used]
    of_zero = written & set(ZERO) if config.strategy.fsdp else set()
    return unused + [f"--{name} has no effect with --fsdp" for name in sorted(of_zero)]


LORA = ("lora_alpha", "lora_dropout", "target_modules")
"""Fields of adapters, without effect where there are none."""

ZERO = ("zero_stage", "zpg", "adam_offload", "param_offload", "overlap_comm", "grad_accum_dtype")
"""Fields of DeepSpeed alone."""

DOORS: dict[str, set[str]] = {
    "train_ppo": set(SECTIONS),
    "train_sft": {"model", "data", "strategy", "optim", "train", "observe"},
    "evaluate": {"model", "data", "strategy", "engine", "rollout", "reward", "train", "observe"},
}
"""The sections that each door reads."""


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(body, body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}. All flags: --help")


def _split_config_flag(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
    tokens = iter(argv)
    for token in tokens:
        if token == "--config":
            file = next(tokens, None)
            if file is None:
                raise ConfigError("--config needs a file")
            files.append(file)
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            rest.append(token)
    return files, rest


def _arguments_of_file(file: str) -> list[str]:
    """A YAML file as the flags that say the same, so that types and choices are checked in one place."""
    try:
        content = yaml.safe_load(Path(file).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: holds no sections, such as `train:` with `seed: 1` under it")
    arguments = []
    owners = section_of_field()
    for section, values in content.items():
        if section not in SECTIONS:
            moved = f"; it belongs under `{owners[section]}:`" if section in owners else _nearest(section, SECTIONS)
            raise ConfigError(f"--config {file}: unknown section {section!r}{moved}")
        if not isinstance(values, dict | None):
            raise ConfigError(f"--config {file}: `{section}:` holds {values!r} instead of keys with values")
        for name, value in (values or {}).items():
            if owners.get(name) != section:
                moved = f"; it belongs under `{owners[name]}:`" if name in owners else _nearest(name, owners)
                raise ConfigError(f"--config {file}: unknown key {name!r} under `{section}:`{moved}")
            if value is None or value == []:
                continue
            if isinstance(value, list):
                arguments += [f"--{name}", *map(str, value)]
            else:
                arguments.append(f"--{name}={value}")  # one word, so that text may begin with a dash
    return arguments


def _check_flag_names(arguments: list[str], known: set[str]) -> None:
    unknown = [token.split("=")[0] for token in arguments if token.startswith("--") and token.split("=")[0] not in known]
    if unknown:
        raise ConfigError("; ".join(f"unknown flag {flag}{_nearest(flag, known)}" for flag in unknown) + ". All flags: --help")


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _missing_inputs(config: Config, door: str) -> list[str]:
    problems = []
    if not config.model.pretrain:
        problems.append("--pretrain is empty: give a Hugging Face folder or hub name")
    elif config.model.pretrain.startswith((".", "/", "~")) and not os.path.isdir(os.path.expanduser(config.model.pretrain)):
        problems.append(f"--pretrain {config.model.pretrain}: no such folder")
    data_flag = "eval_data" if door == "evaluate" else "prompt_data"
    if not getattr(config.data, data_flag):
        problems.append(f"--{data_flag} is empty: give a JSONL or parquet file, a folder of them, or a hub name")
    return problems


def _layout_problems(config: Config, world_size: int) -> list[str]:
    engine_tp, strategy = config.engine.engine_tp_size, config.strategy
    replicate, sp, tp = strategy.dp_replicate, max(strategy.sp_size, strategy.cp_size), strategy.tp_size
    ulysses = strategy.cp_size == 1 and strategy.sp_impl != "zigzag"
    problems = cp_problems(strategy) + lora_problems(config.model, tp_size=tp)
    if world_size % engine_tp:
        problems.append(f"--engine_tp_size {engine_tp} does not divide the {world_size} processes")
    if world_size % (replicate * sp * tp):
        named = (("dp_replicate", replicate), ("cp_size" if strategy.cp_size > 1 else "sp_size", sp), ("tp_size", tp))
        sizes = [f"--{name} {size}" for name, size in named if size > 1]
        problems.append(f"{' x '.join(sizes)} does not divide the {world_size} processes")
    if not strategy.fsdp:
        problems += deepspeed_problems(strategy, bf16=config.model.bf16)
    counts = _heads(config.model.pretrain) if sp * tp > 1 else {}
    problems += [f"--tp_size {tp} does not divide the model's {n} {heads}" for heads, n in counts.items() if n % tp]
    heads = counts.get("attention heads", 0)
    if ulysses and heads % tp == 0 and heads // tp % sp:
        each = f"{heads} attention heads" if tp == 1 else f"{heads // tp} attention heads on each rank of --tp_size {tp}"
        problems.append(f"--sp_size {sp} does not divide the model's {each}; --sp_impl zigzag needs no such thing")
    return problems


def cp_problems(section: StrategySection) -> list[str]:
    """Where --cp_size contradicts what it is short for."""
    short, others = section.cp_size, {"sp_size": (1, section.cp_size), "sp_impl": ("auto", "zigzag")}
    wrong = [f"--{name} {getattr(section, name)}" for name, agreeing in others.items() if getattr(section, name) not in agreeing]
    if short == 1 or not wrong:
        return []
    return [f"--cp_size {short} is short for --sp_size {short} --sp_impl zigzag and contradicts {' '.join(wrong)}: drop one"]


def lora_problems(model: ModelSection, *, tp_size: int) -> list[str]:
    """What of a ModelSection's adapters is impossible, each with the way out."""
    impossible = {
        "--lora_rank must not be negative; 0 trains the model itself": model.lora_rank < 0,
        "--lora_alpha must be above 0": model.lora_alpha <= 0,
        "--lora_dropout is a share, at least 0 and below 1": not 0 <= model.lora_dropout < 1,
        "--target_modules is empty: name linear layers, or say all-linear": not model.target_modules,
        "--target_modules takes all-linear alone, or names": "all-linear" in model.target_modules[1:] + model.target_modules[:-1],
        "--lora_rank needs --tp_size 1: adapters are not split over ranks; --fsdp cuts the model anyway": (
            model.lora_rank > 0 and tp_size > 1
        ),
    }
    return [problem for problem, holds in impossible.items() if holds]


def deepspeed_problems(strategy: Any, *, bf16: bool) -> list[str]:
    """What of a StrategySection ZeRO cannot do, each with the way out."""
    stage = strategy.zero_stage
    impossible = {
        "--tp_size needs --fsdp: DeepSpeed does not split the layers of a model here": strategy.tp_size > 1,
        "--dp_replicate needs --fsdp; --zpg is what comes near it": strategy.dp_replicate > 1,
        "--fsdp_cpu_offload needs --fsdp; --adam_offload and --param_offload are those of ZeRO": strategy.fsdp_cpu_offload,
        "--zero_stage 0 cannot train with --bf16, it has no float32 masters: use 1, 2 or 3": bf16 and stage == 0,
        "--adam_offload needs --zero_stage 1, 2 or 3": strategy.adam_offload and stage == 0,
        "--param_offload needs --zero_stage 3": strategy.param_offload and stage < 3,
        "--zpg needs --zero_stage 3": strategy.zpg > 1 and stage < 3,
    }
    return [problem for problem, holds in impossible.items() if holds]


def _heads(pretrain: str) -> dict[str, int]:
    """What --tp_size and Ulysses divide, as far as a local folder says it; a model from the hub is checked when it is there."""
    file = Path(pretrain).expanduser() / "config.json"
    if not file.is_file():
        return {}
    content = json.loads(file.read_text())
    content = content.get("text_config", content)
    heads = content.get("num_attention_heads")
    counts = {"attention heads": heads, "key-value heads": content.get("num_key_value_heads", heads)}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def needs_reference(algorithm: AlgorithmSection) -> bool:
    """Whether the divergence from a reference model is in the reward or in the loss; with coefficient 0 it is only measured."""
    return algorithm.use_kl_loss or algorithm.init_kl_coef > 0


COMPARING = (
    *("grpo", "group_norm", "gspo", "gmpo", "cispo", "sapo", "cpgd"),
    *("dr_grpo", "reinforce++_baseline", "reinforce_baseline", "rloo", "opo", "pass_at_k"),
)
"""Estimators whose advantage is 0 for a sample that is alone in its group."""


def _algorithm_problems(config: Config) -> list[str]:
    algorithm, rollout, reward = config.algorithm, config.rollout, config.reward
    problems = []
    for name in ("length_filter", "difficulty_filter", "entropy_filter"):
        pair = getattr(algorithm, name)
        if pair and (len(pair) != 2 or pair[0] > pair[1]):
            problems.append(f"--{name} takes the least and the most: two numbers")
    for name, bound in (("advantage_clip", algorithm.advantage_clip), ("reward_clip", reward.reward_clip)):
        if bound is not None and bound <= 0:
            problems.append(f"--{name} must be above 0; leave it out for no clipping")
    if algorithm.clip_cov_range != sorted(algorithm.clip_cov_range) or len(algorithm.clip_cov_range) != 2:
        problems.append("--clip_cov_range takes the least and the most: two numbers")
    for name, share in (("high_entropy_token_ratio", algorithm.high_entropy_token_ratio), ("cov_ratio", algorithm.cov_ratio)):
        if not 0 <= share <= 1:
            problems.append(f"--{name} is a share, between 0 and 1")
    if algorithm.policy_loss == "cpgd" and algorithm.eps_clip_low >= 1:
        problems.append("--policy_loss cpgd takes the logarithm of 1 - eps_clip_low: give less than 1")
    if algorithm.rollout_correction is not None and algorithm.use_engine_logprobs:
        problems.append("--rollout_correction corrects nothing where --use_engine_logprobs measures from the engine: drop one")
    if algorithm.use_kl_loss and algorithm.kl_estimator == "k1":
        problems.append("--kl_estimator k1 is for rewards: as a loss its gradient is zero on average; take k2, k3 or k3+")
    for name, least in (("kl_target", algorithm.kl_target), ("kl_horizon", algorithm.kl_horizon)):
        if least is not None and least <= 0:
            problems.append(f"--{name} must be above 0")
    if algorithm.init_kl_coef < 0:
        problems.append("--init_kl_coef must not be negative")
    if not 0 <= algorithm.gamma <= 1:
        problems.append("--gamma must be between 0 and 1")
    estimator, samples = algorithm.advantage_estimator, rollout.n_samples_per_prompt
    if estimator in COMPARING and samples == 1:
        problems.append(f"--advantage_estimator {estimator} compares the samples of a prompt: --n_samples_per_prompt 2 or more")
    if estimator == "pass_at_k" and not 1 <= algorithm.pass_k <= samples:
        problems.append(f"--pass_k {algorithm.pass_k} draws from --n_samples_per_prompt {samples}: give 1 to {samples}")
    buffer, longest = reward.overlong_buffer_len, rollout.generate_max_len
    if reward.overlong_buffer and not 1 <= buffer <= longest:
        problems.append(f"--overlong_buffer_len {buffer} must be between 1 and --generate_max_len {longest}")
    return problems


def _batch_problems(config: Config) -> list[str]:
    rollout, train = config.rollout, config.train
    problems = []
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if samples % train.train_batch_size:
        problems.append(
            f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt} = {samples} "
            f"samples are not a multiple of train_batch_size {train.train_batch_size}"
        )
    longest = config.data.prompt_max_len + rollout.generate_max_len
    if longest > train.max_tokens_per_microbatch:
        problems.append(
            f"prompt_max_len {config.data.prompt_max_len} + generate_max_len {rollout.generate_max_len} = {longest} tokens "
            f"do not fit into max_tokens_per_microbatch {train.max_tokens_per_microbatch}"
        )
    return problems
