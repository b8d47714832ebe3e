"""Build the trainers that learn from given examples: SFT, reward models, preferences."""

from collections.abc import Callable
from functools import partial

from lightrft.algorithms.preferences.dpo import DPOObjective
from lightrft.algorithms.preferences.reward import RewardObjective
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.app.run.observation import check_logins, log_duration, observation
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.run_folder import RunFolder
from lightrft.app.trainer import build_data
from lightrft.app.trainer.base import TrainingData
from lightrft.app.trainer.build_roles import build_policy, build_reward_model, set_blank_media
from lightrft.app.trainer.supervised import SupervisedTrainer, Task
from lightrft.app.trainer.tasks.dpo import DPOTask
from lightrft.app.trainer.tasks.kto import KTOTask
from lightrft.app.trainer.tasks.process_reward import ProcessRewardTask
from lightrft.app.trainer.tasks.reward_model import RewardModelTask
from lightrft.app.trainer.tasks.sft import SFTTask
from lightrft.config.errors import ConfigError
from lightrft.config.sections import REFERENCE_FREE, Config
from lightrft.data.preferences import load_answers, load_pairs
from lightrft.data.prompt_set import PromptSet
from lightrft.data.step_labels import load_steps
from lightrft.models.load import head_names, load_tokenizer
from lightrft.strategy.checkpoint.final_model import with_merged_pretrain
from lightrft.strategy.strategy import StrategyBase

Learning = tuple[DistributedRole, Task, TrainingData]
"""The role that learns, the task it learns, and the data."""


def sft_trainer(config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    def build(config: Config) -> Learning:
        data = build_data.load_training_data(config)
        policy = _policy(config, strategy, data, reference=False)
        return policy, SFTTask(policy, config.train, expand=data.expand), data

    return _trainer("train_sft", config, strategy, build)


def rm_trainer(config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    def build(config: Config) -> Learning:
        preference = config.preference
        heads = head_names(config.model, preference.reward_heads)
        if len(heads) > 1 and preference.head_key is None:
            raise ConfigError(
                f"--pretrain {config.model.pretrain} has {len(heads)} heads: set --head_key, the"
                " column that names the head of a row"
            )

        data = _load_judged(config, partial(load_pairs, config.data, preference, heads=heads))
        role = _reward_model(config, strategy, data, heads)
        objective = RewardObjective(preference, heads if len(heads) > 1 else [])
        return role, RewardModelTask(role, objective, config.train, data.expand), data

    return _trainer("train_rm", config, strategy, build, role_name="reward_model")


def prm_trainer(config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    def build(config: Config) -> Learning:
        heads = head_names(config.model, [])
        if len(heads) > 1:
            raise ConfigError(
                f"--pretrain {config.model.pretrain} has {len(heads)} heads: train_prm needs a"
                " single one"
            )

        data = _load_judged(config, partial(load_steps, config.data, config.preference))
        role = _reward_model(config, strategy, data, heads)
        return role, ProcessRewardTask(role, config.train, data.expand), data

    return _trainer("train_prm", config, strategy, build, role_name="reward_model")


def dpo_trainer(config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    def build(config: Config) -> Learning:
        data = _load_judged(config, partial(load_pairs, config.data, config.preference))
        section = config.preference
        needed = section.dpo_loss not in REFERENCE_FREE
        live = needed and not section.precompute_reference
        # With precomputed log-probs the reference need not stay in memory.
        policy = _policy(config, strategy, data, reference=live)
        task = DPOTask(policy, DPOObjective(section), config.train, data.expand)
        if needed and not live:
            strategy.announce("reference_logprobs")
            with log_duration(strategy, "log-probs of the reference"):
                task.precompute(data.prompts)
                task.precompute(data.eval_prompts)

        return policy, task, data

    return _trainer("train_dpo", config, strategy, build)


def kto_trainer(config: Config, strategy: StrategyBase) -> SupervisedTrainer:
    def build(config: Config) -> Learning:
        data = _load_judged(config, partial(load_answers, config.data, config.preference))
        policy = _policy(config, strategy, data, reference=True)
        return policy, KTOTask(policy, config.preference, config.train, data.expand), data

    return _trainer("train_kto", config, strategy, build)


def _policy(
    config: Config, strategy: StrategyBase, data: TrainingData, *, reference: bool
) -> Policy:
    with log_duration(strategy, f"loading {config.model.pretrain}"):
        policy = build_policy(config, strategy, updates=data.total_steps, reference=reference)
    set_blank_media(data.expand, policy.actor, policy.reference)
    return policy


def _reward_model(
    config: Config, strategy: StrategyBase, data: TrainingData, heads: list[str]
) -> RewardModel:
    updates = data.total_steps
    with log_duration(strategy, f"loading {config.model.pretrain}"):
        role = build_reward_model(config, strategy, data.tokenizer, updates=updates, heads=heads)
    set_blank_media(data.expand, role.module)
    return role


def _trainer(
    command: str,
    config: Config,
    strategy: StrategyBase,
    build: Callable[[Config], Learning],
    *,
    role_name: str = "actor",
) -> SupervisedTrainer:
    """Claim the run's folder, build what learns, and connect both.

    `build` gets the configuration with a merged --pretrain.
    """
    prepare_config(command, config)
    run_folder = RunFolder.claim(config, strategy.mesh.world)
    check_logins(config, strategy)
    # The trainer records the user's configuration; only its objects see the merged --pretrain.
    role, task, training_data = build(with_merged_pretrain(config, strategy.mesh.world))
    observer, trace = observation(config, strategy)

    return SupervisedTrainer(
        config,
        strategy,
        role,
        training_data,
        task=task,
        role_name=role_name,
        observer=observer,
        trace=trace,
        run_folder=run_folder,
    )


def _load_judged(config: Config, load: Callable[..., PromptSet]) -> TrainingData:
    """Load judged answers for training and evaluation.

    `load` is load_pairs(), or a function like it, with the sections filled in.
    """
    tokenizer = load_tokenizer(config.model)
    train = config.train
    expand = build_data.load_trained_expander(config, tokenizer, engine=False)
    # A row must fit into micro-batches with a backward pass and without one.
    longest = min(
        train.max_tokens_per_microbatch,
        train.max_tokens_per_logprob_microbatch or train.max_tokens_per_microbatch,
    )
    options = {
        "longest": longest,
        "measure": expand and expand.measure,
        "requirements": build_data.limits_of_media(config),
    }
    rows = load(tokenizer, source="prompt_data", **options)
    has_eval = config.data.eval_data
    eval_rows = load(tokenizer, source="eval_data", **options) if has_eval else PromptSet([])
    steps = build_data.steps_of_epochs(config, rows.draws_of_epoch)

    return TrainingData(tokenizer, rows, eval_rows, steps, expand)
