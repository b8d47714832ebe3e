"""Build the models of a run: sharded, and with optimizers and schedules if they learn."""

from functools import partial
from typing import Any, TypeVar

from torch.nn import Module

from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.draft import Draft
from lightrft.algorithms.roles.mixture import MixturePolicy
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.algorithms.roles.teacher import Teacher, Teachers
from lightrft.app.run.run import Run
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
from lightrft.strategy.strategy import with_optimizer

Model = TypeVar("Model", Actor, Scorer)

ANY_TOKEN = Sampling()
"""Sampling that keeps the model's own probabilities, for learning from given responses."""


def build_policy(
    run: Run, *, updates: int, reference: bool, sampling: Sampling = ANY_TOKEN
) -> Policy:
    """Build the sharded actor with optimizer and schedule, and the frozen reference.

    The schedule covers `updates` optimizer steps. Log-probs are taken under the distribution that
    `sampling` draws from, over the ids of the run's tokenizer.
    """
    config, strategy = run.config, run.strategy
    if config.engine.exact:
        from lightrft.engine.build import check_exact

        check_exact(config.engine, strategy.device)
    strategy.announce("load_models")
    check_model(config.model, strategy)
    actor = _empty_actor(run)
    if config.engine.exact:
        extra("--exact").make_actor_exact(actor, strategy.dtype, strategy.device, strategy.world)
    # Engines choose rotary frequencies for the longest possible sequence.
    if sampling is not ANY_TOKEN:
        check_window(actor.language_model, longest_sequence(config))
        shape = actor.language_model.config
        ends = end_token_ids(config.model.pretrain, shape)
        banned = never_sampled(config.model.pretrain, shape, run.tokenizer)
        sampling = sampling.resolved(banned, ends)

    trained = _trained(run, actor, config.optim.learning_rate, updates)
    follower = None
    if reference and moves_reference(config.algorithm):
        follower = _follower(run, actor, computes_like_actor=True)
    # With adapters a reference that stays is the actor without them, so it takes no memory.
    frozen = actor if reference and config.model.lora_rank else None
    if reference and frozen is None and follower is None:
        with strategy.init_model_context():
            frozen = _with_blank(run, Actor(load_model(config.model)).requires_grad_(False))
        # Else the first KL divergence would not be 0.
        frozen = strategy.prepare(_computing_like_actor(run, frozen))

    average = _follower(run, actor) if config.train.enable_ema else None
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


def _empty_actor(run: Run) -> Actor:
    with run.strategy.init_model_context():
        actor = Actor(freeze_parameters(load_model(run.config.model), run.config.model))
    return _with_blank(run, actor)


def _with_blank(run: Run, model: Model) -> Model:
    """Give a model a blank item to process in micro-batches that lack a medium.

    All ranks must run the same collectives, so each runs the tower even without an item of its own.
    """
    if run.expand is not None:
        model.blank = run.expand.blank
    return model


def _follower(run: Run, actor: Actor, *, computes_like_actor: bool = False) -> Actor:
    """Build a model that follows the actor: float32, sharded and adapted like it.

    With `computes_like_actor` its log-probs equal the actor's while its parameters do.
    """
    model = _empty_actor(run)
    if computes_like_actor:
        _computing_like_actor(run, model)
    model = run.strategy.prepare(model)
    if run.config.model.lora_rank:
        # It starts from the actor's adapters, not from other random ones.
        run.strategy.moving_average(actor, model, 0.0)
    return model


def _computing_like_actor(run: Run, model: Actor) -> Actor:
    strategy = run.strategy
    if run.config.model.fp8_training:
        from lightrft.strategy.backends.torchao import use_float8

        use_float8(model, strategy.device)
    if run.config.engine.exact:
        extra("--exact").make_actor_exact(model, strategy.dtype, strategy.device, strategy.world)
    return model


def _trained(run: Run, model: Module, rate: float, updates: int) -> tuple[Any, Any, Any]:
    """Shard a model with the optimizer and the schedule that train it."""
    strategy = run.strategy
    return strategy.prepare(with_optimizer(strategy, model, rate, run.config.optim, updates))


def limits(config: Config) -> dict[str, Any]:
    """Return the limits on a role's micro-batches."""
    train = config.train
    return {
        "max_tokens": train.max_tokens_per_microbatch,
        "max_logprob_tokens": train.max_tokens_per_logprob_microbatch,
        "batching": train.batching,
    }


def build_critic(run: Run, *, updates: int) -> Critic:
    """Build the sharded critic with optimizer and schedule; it gets adapters if the actor does."""
    config, strategy = run.config, run.strategy
    if config.model.critic_pretrain:
        check_vocabulary(config.model, "critic_pretrain", run.tokenizer)
    strategy.announce("load_critic")

    # Without --critic_pretrain the critic starts from --pretrain.
    flag = "critic_pretrain" if config.model.critic_pretrain else "pretrain"
    check_model(config.model, strategy, flag, scores=True)
    with strategy.init_model_context():
        model = load_scorer(config.model, flag)
        scorer = _with_blank(run, Scorer(freeze_parameters(model, config.model)))

    trained = _trained(run, scorer, config.optim.critic_learning_rate, updates)
    return Critic(strategy, *trained, **limits(config))


def build_draft(run: Run, *, updates: int) -> Draft | None:
    """Build the sharded model of --speculative draft, if it learns; all parameters are trained."""
    config, strategy = run.config, run.strategy
    rate = config.optim.draft_learning_rate
    if rate == 0:
        return None

    name = config.engine.draft_pretrain
    check_vocabulary(config.model, "draft_pretrain", run.tokenizer, name=name)
    strategy.announce("load_draft")
    check_model(config.model, strategy, "draft_pretrain", name=name)
    with strategy.init_model_context():
        model = Actor(load_model(config.model, "draft_pretrain", name=name))
    # It imitates what the engine samples, so it learns at the rollout's temperature.
    truncation = Truncation(banned=never_sampled(name, model.language_model.config, run.tokenizer))

    trained = _trained(run, model, rate, updates)
    options = limits(config) | {"temperature": config.rollout.temperature}
    return Draft(strategy, *trained, truncation=truncation, **options)


def build_teacher(run: Run, policy: Policy) -> Teacher:
    """Build the teacher of --distill_coef.

    It is a frozen model sharded like the reference, a client behind HTTP, or the `policy` itself;
    several are one with a choice among them.
    """
    config, strategy = run.config, run.strategy
    strategy.announce("load_teacher")
    teachers = _teachers(run, policy)
    if config.data.teacher_key is None and config.data.teacher_prompt_key is None:
        return teachers[0]

    return Teachers(
        teachers,
        strategy.mesh.data,
        max_tokens=config.train.most_logprob_tokens,
        batching=config.train.batching,
    )


def _teachers(run: Run, policy: Policy) -> list[Teacher]:
    config, strategy = run.config, run.strategy
    if config.model.self_teacher == "actor":
        return [policy]
    if config.model.self_teacher == "average":
        return [_frozen_policy(run, policy.average, policy.truncation)]
    if config.model.teacher_url:
        from lightrft.algorithms.roles.remote_teacher import RemoteTeacher

        patience = 60 * config.reward.server_minutes
        url = config.model.teacher_url
        axis = strategy.mesh.model_parallel
        return [RemoteTeacher(url, run.tokenizer, axis, patience=patience)]

    teachers = []
    for _, name in teacher_terms(config.model.teacher_pretrain):
        _check_reads_alike(run, "teacher_pretrain", name)
        check_model(config.model, strategy, "teacher_pretrain", name=name)
        with strategy.init_model_context():
            model = load_model(config.model, "teacher_pretrain", name=name)
            actor = _with_blank(run, Actor(model).requires_grad_(False))

        # The teacher is limited to the policy's tokens, so that equal weights give equal log-probs.
        banned = {*never_sampled(name, model.config, run.tokenizer), *policy.truncation.banned}
        truncation = Truncation(banned=tuple(sorted(banned)))
        teachers.append(_frozen_policy(run, strategy.prepare(actor), truncation))

    return teachers


def _frozen_policy(run: Run, actor: Actor, truncation: Truncation) -> Policy:
    options = limits(run.config) | {"temperature": run.config.rollout.temperature}
    return Policy(run.strategy, actor, truncation=truncation, **options)


def _check_reads_alike(run: Run, flag: str, name: str) -> None:
    """Raise an error if a model has other tokens than --pretrain, or reads media otherwise."""
    check_vocabulary(run.config.model, flag, run.tokenizer, name=name)
    if run.expand is not None:
        run.expand.check_same(run.config.model, flag, name)


def build_model_rewards(run: Run) -> ModelRewards | None:
    """Build the frozen reward models, sharded like the reference; None if there are none."""
    config = run.config
    models = []
    of_steps = StepRewards(run.tokenizer, config.data.step_separator, config.reward.step_rewards)
    for flag, term in reward_model_terms(config.model):
        _check_reads_alike(run, flag, term.name)
        role = build_frozen_reward_model(run, flag, term.name)
        steps = of_steps if flag == "process_reward_pretrain" else None
        weight = config.reward.reward_model_coef * term.weight
        models.append(ScoringModel(term.label, role, weight, steps))

    return ModelRewards(models, key=config.reward.reward_key, expand=run.expand) if models else None


def build_frozen_reward_model(run: Run, flag: str, name: str) -> RewardModel:
    config, strategy = run.config, run.strategy
    strategy.announce("load_reward_models")
    check_model(config.model, strategy, flag, name=name, scores=True)
    with strategy.init_model_context():
        num_heads = len(stored_heads(config.model, flag, name=name)) or 1
        model = load_scorer(config.model, flag, name=name, new_head=False, num_heads=num_heads)
        scorer = Scorer(model, num_heads=num_heads).requires_grad_(False)
    scorer = strategy.prepare(_with_blank(run, scorer))
    return RewardModel(strategy, scorer, **limits(config))


def build_reward_model(run: Run, *, updates: int, heads: list[str]) -> RewardModel:
    """Build the reward model that learns, sharded, with optimizer and schedule.

    It has a score for each of the named heads.
    """
    config, strategy = run.config, run.strategy
    strategy.announce("load_models")
    check_model(config.model, strategy, scores=True)
    scorer = _empty_reward_model(run, heads)
    trained = _trained(run, scorer, config.optim.learning_rate, updates)

    average = None
    if config.train.enable_ema:
        average = strategy.prepare(_empty_reward_model(run, heads))
        strategy.moving_average(scorer, average, 0.0)  # both start from the same new head

    return RewardModel(strategy, *trained, average=average, **limits(config))


def _empty_reward_model(run: Run, heads: list[str]) -> Scorer:
    config = run.config
    with run.strategy.init_model_context():
        model = load_reward_model(config.model, heads, run.tokenizer)
        model = freeze_parameters(model, config.model)
        scorer = Scorer(model, num_heads=len(heads), learn_scale=config.preference.learn_scale)
    return _with_blank(run, scorer)
