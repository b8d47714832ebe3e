"""Build the models of a run: sharded, and with optimizers and schedules if they learn."""

from functools import partial
from typing import Any

from torch.nn import Module
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.draft import Draft
from lightrft.algorithms.roles.mixture import MixturePolicy
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.algorithms.roles.teacher import Teacher, Teachers
from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.app.trainer.selfcheck import check_model
from lightrft.config.extras import extra
from lightrft.config.references import reward_model_terms, teacher_terms
from lightrft.config.sections import Config, longest_sequence, moves_reference
from lightrft.engine.model_info import end_token_ids, never_sampled
from lightrft.engine.requests import Sampling
from lightrft.models.heads import Actor, Scorer, check_window
from lightrft.models.load import (
    check_vocabulary,
    load_model,
    load_reward_model,
    load_scorer,
    stored_heads,
)
from lightrft.models.logits.truncation import Truncation
from lightrft.models.lora import freeze_parameters
from lightrft.models.routers import RouterChoices, Routers
from lightrft.rewards.models import ModelRewards, ScoringModel
from lightrft.rewards.steps import StepRewards
from lightrft.strategy.strategy import StrategyBase, with_optimizer

ANY_TOKEN = Sampling()
"""Sampling that keeps the model's own probabilities, for learning from given responses."""


def build_policy(
    config: Config,
    strategy: StrategyBase,
    *,
    updates: int,
    reference: bool,
    sampling: Sampling = ANY_TOKEN,
    tokenizer: Tokenizer | None = None,
) -> Policy:
    """Build the sharded actor with optimizer and schedule, and the frozen reference.

    The schedule covers `updates` optimizer steps. Log-probs are taken under the distribution that
    `sampling` draws from, over the ids of the `tokenizer`; None stands for the tokenizer of
    --pretrain, if it has one.
    """
    if config.engine.exact:
        from lightrft.engine.build import check_exact

        check_exact(config.engine, strategy.device)
    strategy.announce("load_models")
    check_model(config.model, strategy)
    with strategy.init_model_context():
        actor = Actor(freeze_parameters(load_model(config.model), config.model))
    if config.engine.exact:
        extra("--exact").make_actor_exact(actor, strategy.dtype, strategy.device, strategy.world)
    # Engines choose rotary frequencies for the longest possible sequence.
    if sampling is not ANY_TOKEN:
        check_window(actor.language_model, longest_sequence(config))
        shape = actor.language_model.config
        ends = end_token_ids(config.model.pretrain, shape)
        sampling = sampling.resolved(never_sampled(config.model.pretrain, shape, tokenizer), ends)

    trained = _trained(config, strategy, actor, config.optim.learning_rate, updates)
    follower = None
    if reference and moves_reference(config.algorithm):
        follower = _follower(config, strategy, actor, computes_like_actor=True)
    # With adapters a reference that stays is the actor without them, so it takes no memory.
    frozen = actor if reference and config.model.lora_rank else None
    if reference and frozen is None and follower is None:
        with strategy.init_model_context():
            frozen = Actor(load_model(config.model)).requires_grad_(False)
        # Else the first KL divergence would not be 0.
        frozen = strategy.prepare(_computing_like_actor(config, strategy, frozen))

    average = _follower(config, strategy, actor) if config.train.enable_ema else None
    algorithm = config.algorithm
    routers = None
    if algorithm.aux_loss_coef > 0:
        routers = Routers(actor.language_model, algorithm.aux_loss_coef)
    if config.engine.router_replay or algorithm.router_bias_rate > 0:
        actor.router_choices = RouterChoices(
            actor.language_model, bias_rate=algorithm.router_bias_rate
        )
    watches = routers is not None or actor.router_choices is not None
    return (partial(MixturePolicy, routers=routers) if watches else Policy)(
        strategy,
        *trained,
        reference=follower or frozen,
        average=average,
        temperature=sampling.temperature,
        truncation=sampling.truncation,
        **limits(config),
    )


def _follower(
    config: Config, strategy: StrategyBase, actor: Actor, *, computes_like_actor: bool = False
) -> Actor:
    """Build a model that follows the actor: float32, sharded and adapted like it.

    With `computes_like_actor` its log-probs equal the actor's while its parameters do.
    """
    with strategy.init_model_context():
        model = Actor(freeze_parameters(load_model(config.model), config.model))
    if computes_like_actor:
        _computing_like_actor(config, strategy, model)
    model = strategy.prepare(model)
    if config.model.lora_rank:
        # It starts from the actor's adapters, not from other random ones.
        strategy.moving_average(actor, model, 0.0)
    return model


def _computing_like_actor(config: Config, strategy: StrategyBase, model: Actor) -> Actor:
    if config.model.fp8_training:
        from lightrft.strategy.backends.torchao import use_float8

        use_float8(model, strategy.device)
    if config.engine.exact:
        extra("--exact").make_actor_exact(model, strategy.dtype, strategy.device, strategy.world)
    return model


def _trained(
    config: Config, strategy: StrategyBase, model: Module, rate: float, updates: int
) -> tuple[Any, Any, Any]:
    """Shard a model with the optimizer and the schedule that train it."""
    return strategy.prepare(with_optimizer(strategy, model, rate, config.optim, updates))


def limits(config: Config) -> dict[str, Any]:
    """Return the limits on a role's micro-batches."""
    train = config.train
    return {
        "max_tokens": train.max_tokens_per_microbatch,
        "max_logprob_tokens": train.max_tokens_per_logprob_microbatch,
        "batching": train.batching,
    }


def set_blank_media(expand: Expander | None, *models: Actor | Scorer | None) -> None:
    """Give models a blank item to process in micro-batches that lack a medium.

    All ranks must run the same collectives, so each runs the tower even without an item of its own.
    """
    for model in models:
        if expand is not None and model is not None:
            model.blank = expand.blank


def build_critic(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, *, updates: int
) -> Critic:
    """Build the sharded critic with optimizer and schedule; it gets adapters if the actor does."""
    if config.model.critic_pretrain:
        check_vocabulary(config.model, "critic_pretrain", tokenizer)
    strategy.announce("load_critic")

    # Without --critic_pretrain the critic starts from --pretrain.
    flag = "critic_pretrain" if config.model.critic_pretrain else "pretrain"
    check_model(config.model, strategy, flag, scores=True)
    with strategy.init_model_context():
        model = load_scorer(config.model, flag)
        scorer = Scorer(freeze_parameters(model, config.model))

    trained = _trained(config, strategy, scorer, config.optim.critic_learning_rate, updates)
    return Critic(strategy, *trained, **limits(config))


def build_draft(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, *, updates: int
) -> Draft | None:
    """Build the sharded model of --speculative draft, if it learns; all parameters are trained."""
    rate = config.optim.draft_learning_rate
    if rate == 0:
        return None

    name = config.engine.draft_pretrain
    check_vocabulary(config.model, "draft_pretrain", tokenizer, name=name)
    strategy.announce("load_draft")
    check_model(config.model, strategy, "draft_pretrain", name=name)
    with strategy.init_model_context():
        model = Actor(load_model(config.model, "draft_pretrain", name=name))
    # It imitates what the engine samples, so it learns at the rollout's temperature.
    truncation = Truncation(banned=never_sampled(name, model.language_model.config, tokenizer))

    trained = _trained(config, strategy, model, rate, updates)
    options = limits(config) | {"temperature": config.rollout.temperature}
    return Draft(strategy, *trained, truncation=truncation, **options)


def build_teacher(
    config: Config,
    strategy: StrategyBase,
    tokenizer: Tokenizer,
    expand: Expander | None,
    policy: Policy,
) -> Teacher:
    """Build the teacher of --distill_coef.

    It is a frozen model sharded like the reference, a client behind HTTP, or the `policy` itself;
    several are one with a choice among them.
    """
    strategy.announce("load_teacher")
    teachers = _teachers(config, strategy, tokenizer, expand, policy)
    if config.data.teacher_key is None and config.data.teacher_prompt_key is None:
        return teachers[0]

    budget = config.train.max_tokens_per_logprob_microbatch
    return Teachers(
        teachers,
        strategy.mesh.data,
        max_tokens=budget or config.train.max_tokens_per_microbatch,
        batching=config.train.batching,
    )


def _teachers(
    config: Config,
    strategy: StrategyBase,
    tokenizer: Tokenizer,
    expand: Expander | None,
    policy: Policy,
) -> list[Teacher]:
    if config.model.self_teacher == "actor":
        return [policy]
    if config.model.self_teacher == "average":
        set_blank_media(expand, policy.average)
        return [_frozen_policy(config, strategy, policy.average, policy.truncation)]
    if config.model.teacher_url:
        from lightrft.algorithms.roles.remote_teacher import RemoteTeacher

        patience = 60 * config.reward.server_minutes
        url = config.model.teacher_url
        axis = strategy.mesh.model_parallel
        return [RemoteTeacher(url, tokenizer, axis, patience=patience)]

    teachers = []
    for _, name in teacher_terms(config.model.teacher_pretrain):
        check_vocabulary(config.model, "teacher_pretrain", tokenizer, name=name)
        if expand is not None:
            expand.check_same(config.model, "teacher_pretrain", name)
        check_model(config.model, strategy, "teacher_pretrain", name=name)
        with strategy.init_model_context():
            model = load_model(config.model, "teacher_pretrain", name=name)
            actor = Actor(model).requires_grad_(False)
        set_blank_media(expand, actor)

        # The teacher is limited to the policy's tokens, so that equal weights give equal log-probs.
        banned = {*never_sampled(name, model.config, tokenizer), *policy.truncation.banned}
        truncation = Truncation(banned=tuple(sorted(banned)))
        teachers.append(_frozen_policy(config, strategy, strategy.prepare(actor), truncation))

    return teachers


def _frozen_policy(
    config: Config, strategy: StrategyBase, actor: Actor, truncation: Truncation
) -> Policy:
    options = limits(config) | {"temperature": config.rollout.temperature}
    return Policy(strategy, actor, truncation=truncation, **options)


def build_model_rewards(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, expand: Expander | None
) -> ModelRewards | None:
    """Build the frozen reward models, sharded like the reference; None if there are none."""
    models = []
    of_steps = StepRewards(tokenizer, config.data.step_separator, config.reward.step_rewards)
    for flag, term in reward_model_terms(config.model):
        check_vocabulary(config.model, flag, tokenizer, name=term.name)
        if expand is not None:
            expand.check_same(config.model, flag, term.name)
        role = build_frozen_reward_model(config, strategy, flag, term.name)
        set_blank_media(expand, role.module)
        steps = of_steps if flag == "process_reward_pretrain" else None
        weight = config.reward.reward_model_coef * term.weight
        models.append(ScoringModel(term.label, role, weight, steps))

    return ModelRewards(models, key=config.reward.reward_key, expand=expand) if models else None


def build_frozen_reward_model(
    config: Config, strategy: StrategyBase, flag: str, name: str
) -> RewardModel:
    strategy.announce("load_reward_models")
    check_model(config.model, strategy, flag, name=name, scores=True)
    with strategy.init_model_context():
        num_heads = len(stored_heads(config.model, flag, name=name)) or 1
        model = load_scorer(config.model, flag, name=name, new_head=False, num_heads=num_heads)
        scorer = Scorer(model, num_heads=num_heads).requires_grad_(False)
    return RewardModel(strategy, strategy.prepare(scorer), **limits(config))


def build_reward_model(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, *, updates: int, heads: list[str]
) -> RewardModel:
    """Build the reward model that learns, sharded, with optimizer and schedule.

    It has a score for each of the named heads.
    """
    strategy.announce("load_models")
    check_model(config.model, strategy, scores=True)
    scorer = _empty_reward_model(config, strategy, tokenizer, heads)
    trained = _trained(config, strategy, scorer, config.optim.learning_rate, updates)

    average = None
    if config.train.enable_ema:
        average = strategy.prepare(_empty_reward_model(config, strategy, tokenizer, heads))
        strategy.moving_average(scorer, average, 0.0)  # both start from the same new head

    return RewardModel(strategy, *trained, average=average, **limits(config))


def _empty_reward_model(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, heads: list[str]
) -> Scorer:
    with strategy.init_model_context():
        model = load_reward_model(config.model, heads, tokenizer)
        model = freeze_parameters(model, config.model)
        scaled = config.preference.learn_scale
        return Scorer(model, num_heads=len(heads), learn_scale=scaled)
