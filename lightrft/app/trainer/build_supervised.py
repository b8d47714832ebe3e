"""Build the trainers that learn from given examples: SFT, reward models, preferences."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightrft.algorithms.preferences.dpo import DPOObjective
from lightrft.algorithms.preferences.reward import RewardObjective
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.app.run.observation import check_logins, log_duration, observe
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.run import Run
from lightrft.app.run.run_folder import RunFolder
from lightrft.app.trainer import build_data
from lightrft.app.trainer.base import TrainingData
from lightrft.app.trainer.build_roles import build_policy, build_reward_model
from lightrft.app.trainer.supervised import SupervisedTrainer, Task
from lightrft.app.trainer.tasks.dpo import DPOTask
from lightrft.app.trainer.tasks.kto import term_of_answers
from lightrft.app.trainer.tasks.reward_model import term_of_pairs, term_of_steps
from lightrft.app.trainer.tasks.sft import term_of_tokens
from lightrft.config.command_line import parse
from lightrft.config.errors import ConfigError
from lightrft.config.paths import check_paths
from lightrft.config.sections import REFERENCE_FREE, Config
from lightrft.data.duplicates import warn_of_learned_rows
from lightrft.data.preferences import load_answers, load_pairs
from lightrft.data.prompt_set import PromptSet
from lightrft.data.step_labels import load_steps
from lightrft.models.load import head_names
from lightrft.strategy.checkpoint.final_model import with_merged_pretrain
from lightrft.strategy.strategy import StrategyBase

OF_PROMPTS = set(
    "apply_chat_template system_prompt chat_template_kwargs chat_template_date prompt_max_len".split()
)
"""What prompts of --eval_generate have in common with the rows that are learned."""
Learning = tuple[DistributedRole, Task, TrainingData]
"""The role that learns, the task it learns, and the data."""


def _sft(run: Run) -> Learning:
    data = _load(run, partial(build_data.load_supervised, run))
    warn_of_learned_rows(data.prompts, data.eval_prompts, run.tokenizer.decode)
    policy = _policy(run, data, reference=False)
    return policy, partial(term_of_tokens, run), data


def _reward_model(run: Run) -> Learning:
    config = run.config
    heads = head_names(config.model, config.preference.reward_heads)
    if len(heads) > 1 and config.preference.head_key is None:
        raise ConfigError(
            f"--pretrain {config.model.pretrain} has {len(heads)} heads: set --head_key, the"
            " column that names the head of a row"
        )

    data = _load_judged(run, load_pairs, heads=heads)
    role = _scorer(run, data, heads)
    objective = RewardObjective(config.preference, heads if len(heads) > 1 else [])
    return role, partial(term_of_pairs, run, role, objective), data


def _process_reward_model(run: Run) -> Learning:
    pretrain = run.config.model.pretrain
    heads = head_names(run.config.model, [])
    if len(heads) > 1:
        raise ConfigError(
            f"--pretrain {pretrain} has {len(heads)} heads: train_prm needs a single one"
        )

    data = _load_judged(run, load_steps)
    role = _scorer(run, data, heads)
    return role, partial(term_of_steps, run, role), data


def _dpo(run: Run) -> Learning:
    data = _load_judged(run, load_pairs)
    section = run.config.preference
    needed = section.dpo_loss not in REFERENCE_FREE
    live = needed and not section.precompute_reference
    # With precomputed log-probs the reference need not stay in memory.
    policy = _policy(run, data, reference=live)
    task = DPOTask(run, policy, DPOObjective(section))
    if needed and not live:
        run.strategy.announce("reference_logprobs")
        with log_duration(run.strategy, "log-probs of the reference"):
            task.precompute(data.prompts)
            task.precompute(data.eval_prompts)

    return policy, task, data


def _kto(run: Run) -> Learning:
    data = _load_judged(run, load_answers)
    policy = _policy(run, data, reference=True)
    return policy, partial(term_of_answers, run, policy), data


SUPERVISED_TASKS: dict[str, Callable[[Run], Learning]] = {
    "train_sft": _sft,
    "train_rm": _reward_model,
    "train_prm": _process_reward_model,
    "train_dpo": _dpo,
    "train_kto": _kto,
}
"""Command -> function that builds what learns."""


def supervised_trainer(command: str, config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    """Claim the run's folder, build what learns, and connect both."""
    prepare_config(command, config)
    run_folder = RunFolder.claim(config, strategy.mesh.world)
    check_logins(config, strategy)
    # The trainer records the user's configuration; only its objects see the merged --pretrain.
    merged = with_merged_pretrain(config, strategy.mesh.world)
    generated = generated_evaluation(merged)
    role, task, training_data = SUPERVISED_TASKS[command](build_data.load_run(merged, strategy))
    answer = None
    if generated is not None:
        # Only these runs need what generates and scores.
        from lightrft.app.trainer.build import held_out_sets
        from lightrft.app.trainer.held_out import measure_sets

        sets, sampler = held_out_sets(generated, strategy, role.module)
        answer = partial(measure_sets, strategy, config.train.seed, sets, sampler)

    return SupervisedTrainer(
        config,
        strategy,
        {"actor" if isinstance(role, Policy) else "reward_model": role},
        training_data,
        task=task,
        answer=answer,
        observer=observe(config, strategy),
        run_folder=run_folder,
    )


def generated_evaluation(config: Config) -> Config | None:
    """Return the configuration of --eval_generate, for the model of a run; None without it.

    Chat template and length of prompts are those of the run unless they are given. Raises
    ConfigError for what `lightrft evaluate` would refuse.
    """
    try:
        flags = shlex.split(config.train.eval_generate)
        if not flags:
            return None

        own = parse(flags if flags[0].startswith("-") else ["--config", *flags], "evaluate")
        for name in OF_PROMPTS - own.data.written:
            own.data.put(name, getattr(config.data, name))
        if "engine_type" not in own.engine.written:
            own.engine.put("engine_type", "hf")
        own.train.put("seed", config.train.seed)

        own = replace(own, model=replace(config.model), strategy=replace(config.strategy))
        for section in (own.model, own.strategy):
            section.written.clear()  # not written for this evaluation
        check_paths(own, "evaluate")
        return prepare_config("evaluate", own)
    except ValueError as error:
        raise ConfigError(f"--eval_generate {config.train.eval_generate}: {error}") from error


def _policy(run: Run, data: TrainingData, *, reference: bool) -> Policy:
    with log_duration(run.strategy, f"loading {run.config.model.pretrain}"):
        return build_policy(run, updates=data.total_steps, reference=reference)


def _scorer(run: Run, data: TrainingData, heads: list[str]) -> RewardModel:
    with log_duration(run.strategy, f"loading {run.config.model.pretrain}"):
        return build_reward_model(run, updates=data.total_steps, heads=heads)


def _load_judged(run: Run, load: Callable[..., PromptSet], **options: Any) -> TrainingData:
    """Load judged answers for training and evaluation.

    `load` is load_pairs(), or a function like it; it gets the `options` too.
    """
    config = run.config
    # A row must fit into micro-batches with a backward pass and without one.
    longest = min(config.train.max_tokens_per_microbatch, config.train.most_logprob_tokens)
    load = partial(
        load,
        config.data,
        config.preference,
        run.tokenizer,
        longest=longest,
        measure=run.expand and run.expand.measure,
        requirements=build_data.limits_of_media(config),
        **options,
    )
    return _load(run, load)


def _load(run: Run, load: Callable[..., PromptSet]) -> TrainingData:
    rows = load(source="prompt_data")
    eval_rows = load(source="eval_data") if run.config.data.eval_data else ()
    steps = build_data.steps_of_epochs(run.config, rows.draws_of_epoch)
    return TrainingData(run.tokenizer, rows, steps, eval_rows)
