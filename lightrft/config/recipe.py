"""Check combinations of algorithms, their numbers, teachers and sampling methods."""

from collections.abc import Iterator, Mapping

from lightrft.config.sections import Config, has_episodes, needs_critic

TEACHERS = ("teacher_pretrain", "teacher_url")
"""Fields that name a teacher."""

COMPARING = (
    *("grpo", "group_norm", "dapo", "gspo", "gmpo", "cispo", "sapo", "cpgd"),
    *("dr_grpo", "reinforce++_baseline", "reinforce_baseline", "rloo", "opo", "pass_at_k"),
)
"""Estimators whose advantage is 0 for the only sample of a group."""


def algorithm_problems(config: Config) -> list[str]:
    """Return the problems of the algorithm in train_ppo, a sentence for each."""
    parts = (_distillation, _ranges, _bounds, _losses, _comparisons, _sampling_problems)
    return [problem for part in parts for problem in _problems(part(config))]


def _problems(impossible: Mapping[str, bool]) -> Iterator[str]:
    return (problem for problem, holds in impossible.items() if holds)


def _distillation(config: Config) -> dict[str, bool]:
    algorithm = config.algorithm
    teachers = [name for name in TEACHERS if getattr(config.model, name)]
    distills = algorithm.distill_coef > 0

    return {
        "--distill_coef must not be negative": algorithm.distill_coef < 0,
        "--advantage_estimator distill learns only from the teacher: --distill_coef must be above 0": (
            algorithm.advantage_estimator == "distill" and not distills
        ),
        "--distill_coef needs a teacher: set --teacher_pretrain or --teacher_url": (
            distills and not teachers
        ),
        "--teacher_pretrain and --teacher_url both name a teacher: set only one": len(teachers) > 1,
        "a server at --teacher_url computes log-probs at temperature 1: set --temperature 1, or use --teacher_pretrain": (
            distills and bool(config.model.teacher_url) and config.rollout.temperature != 1
        ),
    }


def _ranges(config: Config) -> dict[str, bool]:
    """Check pairs of a lower and an upper bound."""
    algorithm = config.algorithm
    names = ("length_filter", "difficulty_filter", "difficulty_weights", "entropy_filter")
    pairs = {name: getattr(algorithm, name) for name in names} | {
        "curriculum": config.rollout.curriculum
    }
    wrong = {name: bool(pair) and not _is_range(pair) for name, pair in pairs.items()}
    wrong["clip_cov_range"] = not _is_range(algorithm.clip_cov_range)

    return {
        f"--{name} takes two numbers: the minimum and the maximum": holds
        for name, holds in wrong.items()
    } | {
        "--rollout_correction_low is above --rollout_correction_high: every token would be masked": (
            algorithm.rollout_correction in ("mis", "icepop")
            and algorithm.rollout_correction_low > algorithm.rollout_correction_high
        ),
        "--rollout_mask_low is above --rollout_mask_high: every sequence would be masked": (
            None not in (algorithm.rollout_mask_low, algorithm.rollout_mask_high)
            and algorithm.rollout_mask_low > algorithm.rollout_mask_high
        ),
    }


def _is_range(pair: list[float]) -> bool:
    return len(pair) == 2 and pair[0] <= pair[1]


def _bounds(config: Config) -> dict[str, bool]:
    algorithm = config.algorithm
    reward = config.reward
    train = config.train
    clips = {"advantage_clip": algorithm.advantage_clip, "reward_clip": reward.reward_clip}
    above = {"kl_target": algorithm.kl_target, "kl_horizon": algorithm.kl_horizon}
    shares = {
        "high_entropy_token_ratio": algorithm.high_entropy_token_ratio,
        "cov_ratio": algorithm.cov_ratio,
    }

    least = {
        "init_kl_coef": algorithm.init_kl_coef,
        "aux_loss_coef": algorithm.aux_loss_coef,
        "freezing_actor_steps": train.freezing_actor_steps,
    }
    buffer = reward.overlong_buffer_len
    longest = config.rollout.generate_max_len

    return {
        **{
            f"--{name} must be above 0; omit it to disable clipping": _at_most_0(bound)
            for name, bound in clips.items()
        },
        **{f"--{name} must be above 0": _at_most_0(bound) for name, bound in above.items()},
        **{
            f"--{name} must be between 0 and 1, because it is a share": not 0 <= share <= 1
            for name, share in shares.items()
        },
        **{f"--{name} must not be negative": bound < 0 for name, bound in least.items()},
        "--value_clip must not be negative; 0 disables clipping": algorithm.value_clip < 0,
        "--ptx_coef must be above 0; omit --pretrain_data to train without the supervised loss": (
            algorithm.ptx_coef <= 0
        ),
        "--over_sampling must be at least 1: it multiplies the number of prompts in a step": (
            config.rollout.over_sampling < 1
        ),
        f"--overlong_buffer_len {buffer} must be between 1 and --generate_max_len {longest}": (
            reward.overlong_buffer and buffer is not None and not 1 <= buffer <= longest
        ),
    }


def _at_most_0(bound: float | None) -> bool:
    return bound is not None and bound <= 0


def _losses(config: Config) -> dict[str, bool]:
    algorithm = config.algorithm
    return {
        "--policy_loss cpgd computes the logarithm of 1 - eps_clip_low: --eps_clip_low must be below 1": (
            algorithm.policy_loss == "cpgd" and algorithm.eps_clip_low >= 1
        ),
        "--rollout_mask masks nothing with --use_engine_logprobs, which makes every ratio 1: set only one": (
            algorithm.rollout_mask != "none" and algorithm.use_engine_logprobs
        ),
        "--rollout_correction corrects nothing with --use_engine_logprobs, which makes every ratio 1: set only one": (
            algorithm.rollout_correction is not None and algorithm.use_engine_logprobs
        ),
        "--kl_estimator k1 is for rewards: as a loss its gradient is zero on average; use k2, k3 or k3+": (
            algorithm.use_kl_loss and algorithm.kl_estimator == "k1"
        ),
        "--freezing_actor_steps needs a critic, which nothing else would train: use --advantage_estimator ppo or gae": (
            config.train.freezing_actor_steps > 0 and not needs_critic(algorithm)
        ),
    }


def _comparisons(config: Config) -> dict[str, bool]:
    """Check that an estimator has something to compare a sample with."""
    algorithm = config.algorithm
    samples = config.rollout.n_samples_per_prompt
    estimator = algorithm.advantage_estimator
    shaping = ("overlong_buffer", "reward_running_norm", "reward_group_norm", "reward_clip")
    shaped = [f"--{name}" for name in shaping if getattr(config.reward, name)]

    return {
        f"--advantage_estimator {estimator} compares the samples of a prompt: set --n_samples_per_prompt 2 or more": (
            estimator in COMPARING and samples == 1
        ),
        f"--pass_k {algorithm.pass_k} must be between 1 and {samples}, because it draws from --n_samples_per_prompt {samples}": (
            estimator == "pass_at_k" and not 1 <= algorithm.pass_k <= samples
        ),
        f"--advantage_estimator remax compares with the unshaped reward of the greedy response: remove {' '.join(shaped)}": (
            estimator == "remax" and bool(shaped)
        ),
    }


def _splits_samples(config: Config) -> bool:
    return max(config.strategy.tp_size, config.strategy.sp_size, config.strategy.cp_size) > 1


def _sampling_problems(config: Config) -> dict[str, bool]:
    rollout = config.rollout
    stale = config.rollout.max_staleness > 0
    episodes = has_episodes(config.environment)
    corrects = (
        config.algorithm.rollout_correction is not None or config.algorithm.use_engine_logprobs
    )
    tail_rounds = rollout.rollout_schedule == "tail_rounds"
    shares = config.engine.engine_tp_size > 1

    others = [
        name
        for name in ("partial_rollout", "dynamic_sampling", "curriculum")
        if getattr(rollout, name)
    ]
    return {
        "--max_staleness generates later steps while others learn: set --rollout_ranks": (
            stale and not rollout.rollout_ranks
        ),
        "--max_staleness learns from samples of older weights: set --rollout_correction tis, or --use_engine_logprobs": (
            stale and not corrects
        ),
        "--max_staleness begins whole groups of later steps: omit --partial_rollout, or set --max_staleness 0": (
            stale and rollout.partial_rollout
        ),
        "--overlap needs the models in device memory while the engine generates: omit --offload_idle": (
            rollout.overlap and config.strategy.offload_idle
        ),
        "--overlap computes log-probs while the engine samples, which needs nondeterministic algorithms: omit --deterministic": (
            rollout.overlap and config.strategy.deterministic
        ),
        "--overlap needs whole samples on each rank, and an engine on each: omit --tp_size, --sp_size, --cp_size and --engine_tp_size": (
            rollout.overlap and (_splits_samples(config) or (shares and not rollout.rollout_ranks))
        ),
        "--max_staleness begins later steps while others learn, and an episode needs its rank between two turns: omit it": (
            episodes and stale
        ),
        "--partial_rollout continues responses in later steps, but the process of an environment ends with its step: omit it": (
            episodes and rollout.partial_rollout
        ),
        "--partial_rollout with --over_sampling continues responses, which can split a text of --stop: set only one": (
            rollout.partial_rollout and rollout.over_sampling > 1 and bool(rollout.stop)
        ),
        "--rollout_schedule tail_rounds starts more prompts than a step needs: set --over_sampling above 1, such as 1.25": (
            tail_rounds and rollout.over_sampling == 1
        ),
        "--rollout_schedule tail_rounds begins unfinished prompts anew and learns from each once in"
        " a pass over the data: remove " + " ".join(f"--{name}" for name in others): tail_rounds
        and bool(others),
        "--dynamic_sampling compares the responses to a prompt: set --n_samples_per_prompt 2 or more": (
            rollout.dynamic_sampling and rollout.n_samples_per_prompt == 1
        ),
        "--dynamic_sampling needs rewards while the engine is awake, and reward models compute theirs while it sleeps: set only one, or serve the reward model and give the address of the server as --reward": (
            rollout.dynamic_sampling
            and bool(config.model.reward_pretrain or config.model.process_reward_pretrain)
        ),
    }
