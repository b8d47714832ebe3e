"""Every knob: typed sections, each field one flat command-line flag and one key of a YAML file.

The text under a field is its help.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import yaml

from lightrft.config.errors import ConfigError
from lightrft.config.renamed import current_names
from lightrft.config.values import Section, nearest, typed_value


@dataclass
class ModelSection(Section):
    pretrain: str = ""
    """Model to start from: a Hugging Face folder or hub name."""
    critic_pretrain: str = ""
    """Model the critic starts from, with its head if it has one (a reward model): a folder or hub name; empty: --pretrain."""
    reward_pretrain: list[str] = field(default_factory=list)
    """Reward models that judge beside --reward, frozen: folders or hub names with one score as their head, and the same tokenizer
    as --pretrain. What they say is added to what --reward says; --reward none leaves it to them."""
    teacher_pretrain: str = ""
    """Model that --distill_coef learns from, with the same tokenizer, frozen beside the actor: a folder or hub name."""
    teacher_url: str = ""
    """The same behind an OpenAI-compatible endpoint that echoes prompts with log-probs, http://host:8000/v1; the environment
    variable TEACHER_API_KEY is its key, if it needs one."""
    bf16: bool = False
    """Compute in bfloat16 with float32 master weights; otherwise everything is float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_policy: Literal["full", "selective"] = "full"
    """What stays of each block: full keeps its input, selective also the results of attention and matrix products."""
    fused_kernels: Literal["none", "liger"] = "none"
    """liger: compute norms, rotary embeddings and feed-forwards of llama, qwen2 and qwen3 models in one kernel each, on an
    accelerator, with the package liger-kernel. In float32 log-probs and gradients change by at most 1e-5."""
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
    freeze_vision_tower: bool = True
    """With images_key: do not train what the model has for images alone, its tower and what leads from there to its text part."""


@dataclass
class DataSection(Section):
    prompt_data: str = ""
    """Training data: a JSONL, JSON or parquet file, a folder of them, or a hub name; several are joined by commas."""
    prompt_data_probs: list[float] = field(default_factory=list)
    """Shares of several data sets in every pass over them, all of whose rows come at least once; unset: each row once."""
    prompt_split: str = "train"
    """Split of the training data."""
    eval_data: str = ""
    """Held-out data, in the same form, for --eval_steps and the end of the run; empty: no evaluation."""
    eval_split: str = "test"
    """Split of the held-out data."""
    pretrain_data: str = ""
    """Prompts with answers that the actor learns beside its samples (--ptx_coef), in the same form; empty: none."""
    pretrain_split: str = "train"
    """Split of these."""
    input_key: str = "input"
    """Column of the prompt: a string, or a list of chat messages."""
    images_key: str | None = None
    """Column of a prompt's images: a path, relative to the data's folder, a list of them, or images of the datasets package; rows
    without are text. In a chat they stand where the text has <image>, else before it. The model has to see."""
    media_root: str = ""
    """Folder that paths of images are relative to and may not leave; empty: relative to the data's folder, and any path."""
    label_key: str = "label"
    """Column of the right answer: rewards receive it as `label`, SFT learns it. Rows that end in an answer need none for SFT."""
    eval_input_key: str | None = None
    """Column of the prompt in --eval_data; unset: --input_key."""
    eval_label_key: str | None = None
    """Column of the right answer in --eval_data; unset: --label_key."""
    reference_key: str | None = None
    """Column of a reference answer: rewards receive it as `reference`."""
    input_template: str | None = None
    """Text around the prompt, with one {}: `Question: {}\\nAnswer: `."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message of the chat template."""
    chat_template_kwargs: str | None = None
    """Further variables of the chat template as a JSON object: '{"enable_thinking": false}'."""
    prompt_max_len: int = 1024
    """Longest prompt in tokens; longer ones are bad rows."""
    max_samples: int | None = None
    """Use only the first so many rows of the training data, of each of several."""
    max_eval_samples: int | None = None
    """Use only the first so many rows of the held-out data."""
    learned_turns: Literal["all", "last"] = "all"
    """Turns of the assistant that SFT and --pretrain_data learn in a conversation: all, or the last one."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with a malformed or too long row: stop with file and line, or skip it and report the count."""


@dataclass
class StrategySection(Section):
    strategy: str = "auto"
    """Way of distributing: fsdp, deepspeed, or a subclass of StrategyBase as module:Class or file.py:Class. auto: fsdp with
    --fsdp, else deepspeed where it is installed, else fsdp."""
    fsdp: bool = False
    """Shard with FSDP2: the short form of --strategy fsdp; --fsdp false is that of --strategy deepspeed."""
    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer in host memory, move shards in when used."""
    reduce_gradients_once: bool = False
    """FSDP2: sum gradients over the ranks after the last micro-batch of an optimizer step alone. That communicates less, but
    every rank keeps the gradient of the whole model until then, four bytes a parameter. Otherwise it is sharded."""
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
    deterministic: bool = False
    """On an accelerator, train with kernels that give the same bits in every run, as a CPU does anyway: attention's backward pass
    is slower and takes more memory. Torch refuses what has no such kernel. The engine's samples are not covered."""
    timeout_minutes: float = 60.0
    """A collective that waits longer ends the run; every rank then logs which ranks are late, and where all of them are."""
    arrival_minutes: float = 10.0
    """A rank that starts and waits longer for all others to come ends the run, and says who has not come."""
    phase_minutes: float = 600.0
    """A phase, such as generate or train, that takes all ranks longer ends the run; every rank logs where all of them are."""


@dataclass
class EngineSection(Section):
    engine_type: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Generation engine; auto: the first of vllm and sglang that is installed, else hf (transformers)."""
    engine_tp_size: int = 1
    """Consecutive ranks that share one engine's weights."""
    engine_mem_util: float = 0.6
    """Share of an accelerator's memory for the engine while awake: vLLM counts all it uses, SGLang weights and cache."""
    engine_kv_cache_gb: float = 1.0
    """Size of vLLM's or SGLang's key-value cache on a CPU, in GB."""
    enable_engine_sleep: bool = True
    """Put the engine to sleep while training, so that both fit on one device."""
    engine_sleep_level: Literal[1, 2] = 2
    """1 keeps the sleeping engine's weights in host memory; 2 drops them, they are streamed in again anyway."""
    engine_enforce_eager: bool = False
    """Run vLLM or SGLang without CUDA graphs; always so on a CPU."""
    limit_mm_image_per_prompt: int = 4
    """Most images of one prompt, for which the engine keeps memory."""
    limit_mm_video_per_prompt: int = 0
    """Most videos of one prompt. None unless told: vLLM keeps memory for the longest that would fit."""
    limit_mm_audio_per_prompt: int = 1
    """Most clips of sound in one prompt."""
    micro_rollout_batch_size: int = 64
    """Prompts that the hf engine generates at once."""
    weight_sync_bucket_mb: int = 512
    """Size of one bucket of the weight stream; the peak extra memory is about two of them. 0: an eighth of the device memory that
    is free on the rank with the least when the stream begins; 512 on a CPU."""
    verify_weight_sync: bool = True
    """Compare fingerprints of weights, sent and in the engine, after every stream, and stop the run where they differ: of all the
    first time, then of a part of each, so that 128 streams verify every element again."""


@dataclass
class RolloutSection(Section):
    rollout_batch_size: int = 128
    """Prompts of one step, over all ranks."""
    n_samples_per_prompt: int = 8
    """Responses sampled for each prompt: the group."""
    generate_max_len: int = 1024
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at it everywhere."""
    top_p: float = 1.0
    """Sample only from the most likely tokens that reach this probability together; log-probs are of that part everywhere."""
    top_k: int = 0
    """Sample only from the k most likely tokens, as with top_p; 0: from all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, special tokens counted; the token that completes one is the response's last."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, beside the model's end tokens."""
    first_token_temperature: float | None = None
    """Sample the first token at this temperature, for variety (FIRE; 30 in the paper). That token is not learned."""
    eval_temperature: float | None = None
    """Temperature of --eval_n_samples; unset: that of training."""
    eval_n_samples: int = 0
    """Evaluation also draws so many responses to each prompt, at the temperature, and tells how often any of k is right."""
    dynamic_sampling: bool = False
    """Ask other prompts in place of those whose responses all got the same reward, until a step is full (DAPO)."""
    dynamic_sampling_rounds: int = 10
    """At most so many rounds; what is missing then is filled up with groups that nothing is learned from."""
    over_sampling: float = 1.0
    """Ask so many times the prompts that are needed, and stop as soon as enough of their groups are complete."""
    early_stop_every: int = 256
    """With over_sampling: after so many tokens of each response the ranks see whether enough groups are complete."""
    partial_rollout: bool = False
    """With over_sampling: go on in the next step with the responses that were stopped; otherwise they are lost. With
    dynamic_sampling too: learn in the next step from groups that were more than needed."""
    curriculum: list[float] = field(default_factory=list)
    """Prompts of whose responses less than the first or more than the second share was right rest for curriculum_rest passes."""
    curriculum_rest: int = 3
    """Passes over the data until such a prompt is asked again."""


@dataclass
class RewardSection(Section):
    reward: str = "exact_match"
    """Reward function: a name, module:function, file.py:function, or the http(s) address of a server."""
    reward_workers: int | None = None
    """Worker processes of each rank that call the reward function while other responses are generated. 0: call it in the rank's
    own process, when all responses are complete. Unset: 2, and 0 for exact_match, gsm8k and none, which take microseconds."""
    reward_memory_gb: float = 4.0
    """Memory that a worker process may allocate for calls; 0: any amount."""
    reward_minutes: float = 30.0
    """A call of the reward function, which is for one prompt, fails when it takes longer; its worker process is killed."""
    reward_failure: Literal["stop", "zero", "drop"] = "stop"
    """What follows when a call raises, dies, takes too long, or returns no finite number for each response. stop: end the run.
    zero: repeat the call for each response alone, and give 0 to those that fail again. drop: learn from no response
    to the prompt."""
    server_minutes: float = 5.0
    """A server of --reward or --teacher_url that is away or busy is asked again for so long."""
    reward_model_coef: float = 1.0
    """What the scores of --reward_pretrain are multiplied with."""
    overlong_buffer: bool = False
    """Lower the reward of a response whose length comes near generate_max_len."""
    overlong_buffer_len: int | None = None
    """The penalty begins so many tokens before generate_max_len and grows linearly; unset: a fifth of it, as in DAPO."""
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
class AlgorithmSection(Section):
    advantage_estimator: str = "grpo"
    """Estimator, with its recipe of other flags (--help NAME shows it): a name, module:function or file.py:function."""
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
    policy_drift_clip: float | None = None
    """The most that the drift of a token counts, before the coefficient, with the loss cpgd; beyond it has no gradient."""
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
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """That ratio of each token, or the product over its sequence."""
    rollout_correction_low: float = 0.5
    """Ratios below this are masked."""
    rollout_correction_high: float = 2.0
    """Ratios above this are truncated or masked."""
    rollout_mask: Literal["none", "sequence", "geometric"] = "none"
    """Leave out sequences by the product or the geometric mean of those ratios, beside any weights of tokens."""
    rollout_mask_low: float | None = None
    """The least of it that is learned from; unset: 0.5 of the product, 0.999 of the geometric mean."""
    rollout_mask_high: float | None = None
    """The most of it that is learned from; unset: 2 of the product, 1.002 of the geometric mean."""
    use_engine_logprobs: bool = False
    """Take the engine's log-probs as those before the step: one forward pass less, and the clip measures from the engine."""
    aux_loss_coef: float = 0.0
    """Coefficient of the loss that keeps the experts of a mixture equally busy: one more forward pass; 0: none."""
    ptx_coef: float = 0.05
    """Coefficient of the supervised loss on --pretrain_data, added to each optimizer step of the actor."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number, always over all ranks and micro-batches of an optimizer step."""
    gamma: float = 1.0
    """Discount of rewards per token."""
    lambd: float = 1.0
    """GAE: how far advantages rely on rewards (1) instead of what the critic expects at the next token (0)."""
    value_clip: float = 0.2
    """The critic's loss clips a new value to the old one plus and minus this; 0: not at all."""
    pass_k: int = 4
    """Draws of the estimator pass_at_k."""
    distill_coef: float = 0.0
    """Add so many times log p_teacher - log p_actor to the advantage of each token (on-policy distillation); 0: no teacher."""
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
    difficulty_weights: list[float] = field(default_factory=list)
    """Weigh advantages between these two: near the second where a group is rarely right and this sample is, or the other way."""
    entropy_filter: list[float] = field(default_factory=list)
    """Learn only from responses whose tokens have a mean entropy between these two, in nats."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss; otherwise it is taken off the reward of each token."""
    init_kl_coef: float = 0.0
    """Coefficient of that divergence; 0: there is no reference model."""
    measure_kl: bool = False
    """Keep a reference model, and report the divergence from it, also with --init_kl_coef 0."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator: k1 is unbiased, k2 has the right gradient, k3 is unbiased and positive, k3+ is k3 with the gradient of k2."""
    kl_after_baseline: bool = False
    """With rloo and the divergence in the reward: take it off each token after the baseline, instead of off rewards before it."""
    kl_target: float | None = None
    """Move the coefficient so that the divergence per token comes near this."""
    kl_horizon: int = 10000
    """How slowly it moves: in so many samples by a fifth at most."""


@dataclass
class OptimSection(Section):
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
class TrainSection(Section):
    seed: int = 42
    """Seed of everything random."""
    num_episodes: int = 1
    """Passes over the prompt data."""
    max_steps: int | None = None
    """Stop after so many steps, whatever num_episodes says."""
    max_epochs: int = 1
    """Passes over each step's samples."""
    freezing_actor_steps: int = 0
    """In the first so many steps only the critic learns; the actor's schedule begins after them."""
    train_batch_size: int = 1024
    """Samples of one optimizer step, over all ranks."""
    micro_train_batch_size: int | None = None
    """Most sequences of one forward and backward pass on one rank; unset: max_tokens_per_microbatch alone decides."""
    max_tokens_per_microbatch: int = 16384
    """Most tokens of one forward and backward pass on one rank; --sp_size ranks divide so many among them."""
    max_tokens_per_logprob_microbatch: int | None = None
    """Most tokens of one forward pass without gradients on one rank: log-probs of actor and reference, values, scores of reward
    models; unset: max_tokens_per_microbatch, and the same micro-batches as in training."""
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
    overwrite: bool = False
    """Begin afresh in a folder that has the results of an earlier run; they are moved to FOLDER.previous."""
    mismatch_limit: float | None = None
    """End the run when the log-probs of engine and trainer differ by more than this on average, in a step; unset: only warn of a
    difference far above that of the steps before."""
    stop_loss: float | None = None
    """SFT ends once a step's loss is below this."""
    eval_steps: int = -1
    """Evaluate on --eval_data every so many steps, and at the end; -1: only at the end."""


@dataclass
class ObserveSection(Section):
    logging_steps: int = 1
    """Report metrics every so many steps."""
    use_tensorboard: bool = True
    """Write TensorBoard files to save_path/tensorboard."""
    use_wandb: bool = False
    """Send metrics to Weights & Biases."""
    wandb_project: str = "lightrft"
    """Project there."""
    wandb_org: str | None = None
    """Team or user that the project belongs to there; unset: your own."""
    wandb_group: str | None = None
    """Group of runs there."""
    wandb_run_name: str | None = None
    """Name of the run there."""
    num_trajectories_to_save: int = 8
    """Samples of each step written to save_path/samples.jsonl, all samples of one prompt before those of the next; 0: none."""


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

    def __post_init__(self) -> None:
        self.command = ""
        """The command that resolve() made this configuration ready for; empty before."""
        self.notices: list[str] = []
        """What was understood otherwise than it was written, a sentence for each."""
        self.extra_args: dict[str, Any] = {}
        """Values of a user's own arguments, by names that are not fields."""

    def __getattr__(self, name: str) -> Any:
        """Return a field of any section, or an extra argument, by its flat name: `config.bf16` is `config.model.bf16`."""
        if not name.startswith("_"):  # private and special names would recurse while a copy is made
            if name in (owners := section_of_field()):
                return getattr(getattr(self, owners[name]), name)
            if name in self.__dict__.get("extra_args", {}):
                return self.extra_args[name]
        raise AttributeError(f"the configuration has no {name!r}, neither as a field nor in extra_args")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build a configuration from flat names, as flags are: `Config.of(pretrain="model", max_steps=7)`.

        A function may stand where a flag names one, if another process could import it. ConfigError for an unknown name or a
        value of another type.
        """
        config = cls()
        config.update(values)
        return config

    def update(self, values: Mapping[str, Any], source: str = "") -> None:
        """Set fields by their flat names; `source` begins the message of a ConfigError, such as the name of a file."""
        owners, types, problems = section_of_field(), field_types(), []
        try:
            values, notices = current_names(values, typed_value)
        except ValueError as error:
            raise ConfigError(f"{source}{error}") from error
        self.notices += notices
        for name, value in values.items():
            if name not in owners:
                problems.append(f"unknown name {name!r}{nearest(name, owners)}")
                continue
            try:
                setattr(getattr(self, owners[name]), name, typed_value(types[name], value))
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ConfigError("; ".join(source + problem for problem in problems))

    @property
    def written(self) -> set[str]:
        """The names of the fields that the user set; a recipe fills the others."""
        return set().union(*(getattr(self, name).written for name in SECTIONS))

    def expand(self, recipe: Mapping[str, Any]) -> None:
        """Set the fields of a recipe, except those that the user wrote."""
        owners, written = section_of_field(), self.written
        for name in recipe.keys() - written:
            getattr(self, owners[name]).put(name, recipe[name])

    def write(self, path: Path) -> None:
        """Write the resolved configuration in the form that `--config` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


SECTIONS: dict[str, type] = {section.name: section.default_factory for section in fields(Config)}


def section_of_field() -> dict[str, str]:
    """Field name -> section name. Names are unique over all sections, so a flag needs no prefix."""
    return {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}


@cache
def field_types() -> dict[str, Any]:
    """Return field name -> declared type."""
    return {name: kind for cls in SECTIONS.values() for name, kind in get_type_hints(cls).items() if name in section_of_field()}


def sequence_layout(strategy: StrategySection) -> tuple[int, str]:
    """Return how many ranks divide a sequence, and the method, from --sp_size, --sp_impl and the short form --cp_size."""
    if strategy.cp_size > 1:
        return strategy.cp_size, "zigzag"
    return strategy.sp_size, "ulysses" if strategy.sp_impl == "auto" else strategy.sp_impl


CRITICS = ("gae", "ppo")
"""Estimators that compare a reward with what a critic expected."""


def needs_critic(algorithm: AlgorithmSection) -> bool:
    return algorithm.advantage_estimator in CRITICS


def needs_reference(algorithm: AlgorithmSection) -> bool:
    """Return whether the divergence from a reference model is in the reward or in the loss, or is to be measured."""
    return algorithm.init_kl_coef > 0 or algorithm.measure_kl
