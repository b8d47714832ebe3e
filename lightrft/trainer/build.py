"""Build a trainer that is ready to run from a configuration. This module only connects the parts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.kl import KLCoefficient
from lightrft.algorithms.objectives import PolicyObjective
from lightrft.algorithms.options import keywords
from lightrft.algorithms.shaping import RewardShaper
from lightrft.checkpoint.final_model import with_merged_pretrain, with_model_of_run
from lightrft.config.errors import ConfigError
from lightrft.config.references import TRACKERS, eval_sources, report_names
from lightrft.config.sections import Config, needs_critic, needs_reference
from lightrft.config.values import CommaSeparated
from lightrft.data.benchmarks import benchmarks, with_own_columns
from lightrft.data.conversations import load_examples
from lightrft.data.loader import Order
from lightrft.data.prompts import load_prompts
from lightrft.engine.model_info import placeholder_token_ids
from lightrft.engine.requests import Sampling
from lightrft.models.heads import Actor, Scorer, check_window
from lightrft.models.load import check_vocabulary, load_model, load_scorer, load_tokenizer
from lightrft.models.routers import Routers
from lightrft.models.trainable import freeze_parameters
from lightrft.observe.console import Console
from lightrft.observe.sinks import JsonLines, Observer, Sink, TensorBoard
from lightrft.observe.text import duration
from lightrft.observe.trace import Trace
from lightrft.observe.trackers import Tracker
from lightrft.parallel import device
from lightrft.rewards.models import ModelRewards
from lightrft.rewards.runner import RewardRunner
from lightrft.roles.critic import Critic
from lightrft.roles.policy import Policy
from lightrft.roles.reward_model import RewardModel
from lightrft.roles.teacher import Teacher
from lightrft.rollout.collector import Collector
from lightrft.rollout.experience import ExperienceMaker
from lightrft.rollout.media import Expander
from lightrft.rollout.sampler import Sampler
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.base import TrainingData
from lightrft.trainer.evaluate import HeldOut
from lightrft.trainer.evaluation import Evaluation
from lightrft.trainer.ppo import PPOTrainer
from lightrft.trainer.prepare import prepare_config
from lightrft.trainer.run_folder import RunFolder
from lightrft.trainer.sft import SFTTrainer
from lightrft.trainer.supervised import PtxLoss
from lightrft.types import Prompt

ANY_TOKEN = Sampling()
"""Sampling that gives every token its own probability, for learning from given responses."""


def ppo_trainer(config: Config, strategy: StrategyBase) -> PPOTrainer:
    prepare_config("train_ppo", config)
    run_folder = RunFolder.claim(config, strategy.mesh.world)
    given, config = config, with_merged_pretrain(config, strategy.mesh.world)
    rewards = build_rewards(config, strategy)
    training_data = load_training_data(config, config.rollout.rollout_batch_size, rewards=rewards)
    rewards.check(training_data.prompts)
    eval_sets = build_eval_sets(config, strategy, training_data.tokenizer, training_data.expand, rewards)
    tokenizer, steps = training_data.tokenizer, training_data.total_steps
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    updates = samples // config.train.train_batch_size * config.train.max_epochs
    algorithm = config.algorithm
    frozen = config.train.freezing_actor_steps
    if frozen >= steps:
        raise ConfigError(f"--freezing_actor_steps {frozen} leaves no step to train the actor: this run has {steps} steps")
    sampling, reference = Sampling.of(config.rollout), needs_reference(algorithm)
    with log_duration(strategy, f"loading {config.model.pretrain}"):
        policy = build_policy(config, strategy, updates=(steps - frozen) * updates, reference=reference, sampling=sampling)
    set_blank_image(policy, training_data.expand)
    critic = build_critic(config, strategy, tokenizer, updates=steps * updates) if needs_critic(algorithm) else None
    teacher = build_teacher(config, strategy, tokenizer) if algorithm.distill_coef > 0 else None
    if algorithm.aux_loss_coef > 0:
        policy.routers = Routers(policy.actor.language_model, algorithm.aux_loss_coef)
    ptx_loss = build_ptx_loss(config, policy, training_data) if config.data.pretrain_data else None
    rewards.models = build_model_rewards(config, strategy, tokenizer)
    strategy.announce("start_engine")
    with log_duration(strategy, f"starting the engine (--engine_type {config.engine.engine_type})"):
        strategy.setup_inference_engine(config, config.engine.engine_type, actor=policy.actor)
    collect = collector(config, strategy, training_data.prompts, Sampler(strategy, tokenizer, config.rollout), rewards)
    shaper = RewardShaper(config.reward, longest=config.rollout.generate_max_len)
    kl_coefficient = KLCoefficient(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    parts = {"collector": collect, "reward_shaper": shaper, "kl_coefficient": kl_coefficient}
    strategy.report_memory("models and engine are ready;")
    observer, trace = observation(config, strategy)
    return PPOTrainer(
        given,
        strategy,
        policy,
        training_data,
        observer=observer,
        trace=trace,
        run_folder=run_folder,
        collect=collect,
        make_experience=ExperienceMaker(
            policy,
            algorithm,
            config.train,
            shape=shaper,
            kl_coefficient=kl_coefficient,
            critic=critic,
            teacher=teacher,
            first_token_apart=sampling.first_token_temperature is not None,
            expand=training_data.expand,
        ),
        objective=PolicyObjective(algorithm, kl_coefficient),
        critic=critic,
        ptx_loss=ptx_loss,
        eval_sets=eval_sets,
        parts=parts | ({"mixin": ptx_loss} if ptx_loss else {}),
    )


def sft_trainer(config: Config, strategy: StrategyBase) -> SFTTrainer:
    prepare_config("train_sft", config)
    run_folder = RunFolder.claim(config, strategy.mesh.world)
    given, config = config, with_merged_pretrain(config, strategy.mesh.world)
    training_data = load_training_data(config, config.train.train_batch_size)
    with log_duration(strategy, f"loading {config.model.pretrain}"):
        policy = build_policy(config, strategy, updates=training_data.total_steps, reference=False)
    set_blank_image(policy, training_data.expand)
    observer, trace = observation(config, strategy)
    return SFTTrainer(given, strategy, policy, training_data, observer=observer, trace=trace, run_folder=run_folder)


@contextmanager
def log_duration(strategy: StrategyBase, what: str) -> Iterator[None]:
    """Print on rank 0 what begins, and how long it took once it is done."""
    began = time.perf_counter()
    strategy.print(f"{what} ...")
    yield
    strategy.print(f"{what}: done after {duration(time.perf_counter() - began)}")


def load_training_data(config: Config, batch_size: int, *, rewards: RewardRunner | None = None) -> TrainingData:
    """Load the training data with the columns that `rewards` needs; without rewards, the held-out data too, and answers."""
    tokenizer = load_tokenizer(config.model)
    expand = load_expander(config, tokenizer, engine=rewards is not None)
    if expand is not None:
        expand.check_family()
    load = (
        partial(load_prompts, config.data, tokenizer, row_problem=rewards.row_problem, measure=expand and expand.measure)
        if rewards
        else partial(_load_examples, config, tokenizer, expand)
    )
    prompts = load()
    eval_prompts = load(source="eval_data") if config.data.eval_data and rewards is None else []
    return TrainingData(tokenizer, prompts, eval_prompts, total_steps(config, len(prompts), batch_size), expand)


def load_expander(config: Config, tokenizer: PreTrainedTokenizerBase, *, engine: bool) -> Expander | None:
    """Return the expander of prompts with images, of no more than an `engine` takes; None if all prompts are text.

    The tokenizer gets the chat template of the processor, which contains the image placeholders.
    """
    if not config.data.images_key:
        return None
    expand = Expander(config.model, most=config.engine.limit_mm_image_per_prompt if engine else None)
    try:
        tokenizer.chat_template = expand.chat_template or tokenizer.chat_template
    except ValueError as error:
        raise ConfigError(f"--images_key: {error}; omit the flag to train the model on text") from error
    return expand


def _load_examples(
    config: Config, tokenizer: PreTrainedTokenizerBase, expand: Expander | None, *, source: str = "prompt_data"
) -> list[Prompt]:
    longest, measure = config.train.max_tokens_per_microbatch, expand and expand.measure
    return load_examples(config.data, tokenizer, source=source, longest=longest, measure=measure)


def collector(
    config: Config, strategy: StrategyBase, prompts: list[Prompt], sampler: Sampler, rewards: RewardRunner
) -> Collector:
    greedy = "greedy_rewards" in keywords(estimators[config.algorithm.advantage_estimator])
    data, seed = strategy.mesh.data, config.train.seed
    order = strategy.data_order(len(prompts))
    return Collector(sampler, rewards, prompts, section=config.rollout, data=data, seed=seed, greedy=greedy, order=order)


def total_steps(config: Config, num_rows: int, batch_size: int) -> int:
    """Return the number of whole batches in all passes over the data, at most --max_steps."""
    Order.check(num_rows, batch_size)
    steps = num_rows * config.train.num_episodes // batch_size
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def build_policy(
    config: Config, strategy: StrategyBase, *, updates: int, reference: bool, sampling: Sampling = ANY_TOKEN
) -> Policy:
    """Build the sharded actor with its optimizer and schedule over `updates` optimizer steps, and the frozen reference.

    Log-probs are those of the distribution that `sampling` draws from.
    """
    optim = config.optim
    strategy.announce("load_models")
    with strategy.init_model_context():
        actor = Actor(freeze_parameters(load_model(config.model), config.model))
    if sampling is not ANY_TOKEN:  # an engine chooses rotary frequencies for the longest possible sequence
        check_window(actor.language_model, config.data.prompt_max_len + config.rollout.generate_max_len)
    optimizer = strategy.create_optimizer(actor, optim.actor_learning_rate, optim.adam_betas, optim.l2)
    scheduler = strategy.create_scheduler(optimizer, optim.lr_scheduler, round(optim.lr_warmup_ratio * updates), updates)
    drawn = sampling.resolved(placeholder_token_ids(actor.language_model.config)) if sampling is not ANY_TOKEN else sampling
    actor, optimizer, scheduler = strategy.prepare((actor, optimizer, scheduler))
    frozen = actor if reference and config.model.lora_rank else None
    if reference and frozen is None:
        with strategy.init_model_context():
            frozen = Actor(load_model(config.model)).requires_grad_(False)
        frozen = strategy.prepare(frozen)
    average = None
    if config.train.enable_ema:
        with strategy.init_model_context():
            average = Actor(freeze_parameters(load_model(config.model), config.model))
        average = strategy.prepare(average)
        if config.model.lora_rank:
            strategy.moving_average(actor, average, 0.0)  # start from the actor's adapters, not from other random ones
    return Policy(
        strategy,
        actor,
        optimizer,
        scheduler,
        reference=frozen,
        average=average,
        temperature=drawn.temperature,
        truncation=drawn.truncation,
        **limits(config),
    )


def limits(config: Config) -> dict[str, Any]:
    """Return the limits on a Role's micro-batches."""
    train = config.train
    return {
        "max_tokens": train.max_tokens_per_microbatch,
        "max_logprob_tokens": train.max_tokens_per_logprob_microbatch,
        "batching": train.batching,
    }


def set_blank_image(policy: Policy, expand: Expander | None) -> None:
    """Make the models process a blank image in micro-batches without images, where other micro-batches have some."""
    for model in (policy.actor, policy.reference):
        if expand is not None and model is not None:
            model.blank = expand.blank


def build_critic(config: Config, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, *, updates: int) -> Critic:
    """Build the sharded critic with its optimizer and schedule; it gets adapters as the actor does."""
    optim = config.optim
    if config.model.critic_pretrain:
        check_vocabulary(config.model, "critic_pretrain", tokenizer)
    strategy.announce("load_critic")
    with strategy.init_model_context():
        model = load_scorer(config.model, "critic_pretrain" if config.model.critic_pretrain else "pretrain")
        scorer = Scorer(freeze_parameters(model, config.model))
    optimizer = strategy.create_optimizer(scorer, optim.critic_learning_rate, optim.adam_betas, optim.l2)
    scheduler = strategy.create_scheduler(optimizer, optim.lr_scheduler, round(optim.lr_warmup_ratio * updates), updates)
    return Critic(strategy, *strategy.prepare((scorer, optimizer, scheduler)), **limits(config))


def build_teacher(config: Config, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase) -> Teacher:
    """Build a frozen model on the same devices, sharded like the reference, or a client of a teacher behind HTTP."""
    strategy.announce("load_teacher")
    if config.model.teacher_url:
        try:
            from lightrft.roles.remote_teacher import RemoteTeacher
        except ModuleNotFoundError as error:
            raise ConfigError(f"--teacher_url needs {error.name}: pip install httpx tenacity") from error
        patience = 60 * config.reward.server_minutes
        return RemoteTeacher(config.model.teacher_url, tokenizer, strategy.mesh.model_parallel, patience=patience)
    check_vocabulary(config.model, "teacher_pretrain", tokenizer)
    with strategy.init_model_context():
        model = Actor(load_model(config.model, "teacher_pretrain")).requires_grad_(False)
    return Policy(strategy, strategy.prepare(model), temperature=config.rollout.temperature, **limits(config))


def build_model_rewards(
    config: Config, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase
) -> ModelRewards | None:
    """Build the frozen models of --reward_pretrain, sharded like the reference; return None if there are none."""
    models: dict[str, RewardModel] = {}
    for name in config.model.reward_pretrain:
        strategy.announce("load_reward_models")
        check_vocabulary(config.model, "reward_pretrain", tokenizer, name=name)
        with strategy.init_model_context():
            model = load_scorer(config.model, "reward_pretrain", name=name, new_head=False)
            scorer = Scorer(model).requires_grad_(False)
        short = Path(name).name
        name = f"{short}_{len(models)}" if short in models else short
        models[name] = RewardModel(strategy, strategy.prepare(scorer), **limits(config))
    return ModelRewards(models, config.reward.reward_model_coef) if models else None


def build_ptx_loss(config: Config, policy: Policy, training_data: TrainingData) -> PtxLoss:
    """Build the supervised loss on --pretrain_data, which is added to the loss on the samples."""
    tokenizer, expand = training_data.tokenizer, training_data.expand
    prompts = _load_examples(config, tokenizer, expand, source="pretrain_data")
    if len(prompts) < config.train.train_batch_size:
        raise ConfigError(
            f"--pretrain_data {config.data.pretrain_data}: {len(prompts)} rows do not fill one optimizer step of "
            f"--train_batch_size {config.train.train_batch_size}"
        )
    given = {"expand": expand, "order": policy.strategy.data_order(len(prompts))}
    return PtxLoss(policy, prompts, tokenizer, train=config.train, coefficient=config.algorithm.ptx_coef, **given)


def build_rewards(config: Config, strategy: StrategyBase) -> RewardRunner:
    chat = config.data.apply_chat_template
    return RewardRunner(config.reward.reward, strategy.mesh.model_parallel, config.reward, chat=chat, fail=strategy.fail)


def build_eval_sets(
    config: Config, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, expand: Expander | None, rewards: RewardRunner
) -> list[HeldOut]:
    """Load the sets of --eval_data: those of benchmarks are scored by their verifiers, the others by `rewards`."""
    verifiers: dict[str, RewardRunner] = {}
    sets = []
    for each in eval_sources(config.data.eval_data):
        runner, section, options = rewards, config.data, {"measure": expand and expand.measure}
        if each.benchmark:
            benchmark = benchmarks[each.benchmark]
            if benchmark.reward not in verifiers:
                scoring = replace(config.reward, reward=CommaSeparated(benchmark.reward), reward_key=None)
                verifiers[benchmark.reward] = build_rewards(replace(config, reward=scoring), strategy)
            runner, section, options = verifiers[benchmark.reward], with_own_columns(section), {"make": benchmark.make}
        section = replace(section, eval_data=CommaSeparated(each.source))
        prompts = load_prompts(section, tokenizer, source="eval_data", row_problem=runner.row_problem, **options)
        runner.check(prompts)
        sets.append(HeldOut(each.name, prompts, runner))
    return sets


def evaluation(config: Config, strategy: StrategyBase) -> Evaluation:
    """Load the held-out prompts, start an engine with the weights of `pretrain`, and load the models of the rewards.

    `pretrain` may also be a run's folder or a checkpoint.
    """
    given, config = config, with_merged_pretrain(with_model_of_run(config, strategy.mesh.world), strategy.mesh.world)
    tokenizer, rewards = load_tokenizer(config.model), build_rewards(config, strategy)
    sets = build_eval_sets(config, strategy, tokenizer, load_expander(config, tokenizer, engine=True), rewards)
    if any(each.rewards is rewards for each in sets):
        rewards.models = build_model_rewards(config, strategy, tokenizer)
    # The engine sleeps only for reward models: nothing else needs the device.
    engine = replace(config.engine, enable_engine_sleep=rewards.models is not None)
    strategy.announce("start_engine")
    with log_duration(strategy, f"starting the engine (--engine_type {config.engine.engine_type}) with {config.model.pretrain}"):
        strategy.setup_inference_engine(replace(config, engine=engine))
    return Evaluation(given, strategy, sets, Sampler(strategy, tokenizer, config.rollout))


def observation(config: Config, strategy: StrategyBase) -> tuple[Observer, Trace]:
    """Build the observer, with sinks on rank 0 only, and a trace on every rank."""
    observer = Observer(_sinks(config) if strategy.is_rank_0() else [])

    def on_phase(path: str) -> None:
        strategy.announce(path)
        if path:
            observer.phase(path)

    trace = Trace(
        peak_memory=partial(device.peak_memory, strategy.device),
        memory_in_use=partial(device.memory_in_use, strategy.device),
        synchronize=partial(device.synchronize, strategy.device),
        on_phase=on_phase,
    )
    return observer, trace


def _sinks(config: Config) -> list[Sink]:
    folder, observe = Path(config.train.save_path), config.observe
    sinks: list[Sink] = [Console(), JsonLines(folder)]
    names = report_names(observe.report_to)
    if "tensorboard" in names:
        sinks.append(TensorBoard(folder))
    return [*sinks, *(Tracker(name, folder, observe) for name in names if name in TRACKERS)]
