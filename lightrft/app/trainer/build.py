"""Build a trainer that is ready to run from a configuration; this module only connects objects."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient
from lightrft.algorithms.objectives import ValueObjective, sft
from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.draft import Draft
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.teacher import Teacher
from lightrft.algorithms.rollout.experience import flatten_for_run
from lightrft.algorithms.rollout.measures import measure_turns_and_drafts
from lightrft.algorithms.rollout.rollout import JudgedRollout, ResumableRollout, schedulers
from lightrft.algorithms.rollout.sampler import RunSampler, sampling_of
from lightrft.algorithms.schedulers.overlap import Overlap
from lightrft.algorithms.schedulers.rounds import Rounds, needs_rounds
from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.build import experience_maker
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.algorithms.terms import policy_objective
from lightrft.algorithms.unread import unread_columns
from lightrft.app.run.observation import check_logins, log_duration, observe
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.recorded_samples import RecordedSamples
from lightrft.app.run.run import Run
from lightrft.app.run.run_folder import RunFolder
from lightrft.app.trainer import build_data, build_roles
from lightrft.app.trainer.base import TrainingData
from lightrft.app.trainer.evaluation import evaluate_sets
from lightrft.app.trainer.held_out import HeldOut, measure_sets
from lightrft.app.trainer.ppo import PPOTrainer, ReplayedStep
from lightrft.app.trainer.tasks.sft import PtxLoss
from lightrft.config import references, sections
from lightrft.config.errors import ConfigError
from lightrft.config.extras import WATCHED, WITH_EPISODES, extra
from lightrft.config.sections import AlgorithmSection, Config, RolloutSection
from lightrft.config.values import CommaSeparated
from lightrft.core.batch import RoutedShape
from lightrft.core.experience import ExperienceMaker, flatten
from lightrft.core.groups import Group
from lightrft.core.losses import PolicyObjective
from lightrft.core.role import Learner
from lightrft.core.rollout import Scheduler
from lightrft.core.step import Measure, Step
from lightrft.core.table import keywords
from lightrft.data.benchmarks import benchmarks, with_benchmark_columns
from lightrft.data.duplicates import warn_of_learned_rows
from lightrft.data.prompts import load_prompts
from lightrft.models.load import load_tokenizer
from lightrft.rewards.engine_judge import EngineJudge
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.checkpoint.final_model import with_merged_pretrain, with_model_of_run
from lightrft.strategy.checkpoint.manager import OptionalItems
from lightrft.strategy.strategy import StrategyBase

SCHEDULER_INPUTS = ("sampler", "rewards", "prompts")
SCHEDULER_OPTIONS = tuple(
    "section data seed greedy order expander trace skips_unreadable overlap total_steps".split()
)
"""Keywords that a scheduler may name, beside the fields of the rollout section."""


def ppo_trainer(config: Config, strategy: StrategyBase) -> PPOTrainer:
    """Build everything that a run of train_ppo needs, in order: data, models, engine, loop.

    A function that builds what an option adds returns None without the option.
    """
    prepare_config("train_ppo", config)
    world = strategy.mesh.world
    run_folder = RunFolder.claim(config, world)
    check_logins(config, strategy)
    original = config
    # The trainer records what the user wrote, without what is added to the configuration here.
    config = with_merged_pretrain(config, world)
    if sections.has_episodes(config.environment):
        config = extra(WITH_EPISODES).with_tools(config, world)
    check_engine(config, strategy)

    # data, and what reads it
    rewards = build_rewards(config, strategy)
    run = build_data.load_run(config, strategy, engine=True)
    prompts = build_data.load_rewarded(run, rewards)
    steps = build_data.steps_of_epochs(config, prompts.draws_of_epoch, generates=True)
    training_data = TrainingData(run.tokenizer, prompts, steps)
    rewards.check(prompts.examples)
    shaper = RewardShaper(config.reward, longest=config.rollout.generate_max_len)
    for notice in unread_columns(config.algorithm, prompts[0].columns):
        strategy.print(notice)
    scheduler_class(run)  # what does not fit is said before models load
    eval_sets = build_eval_sets(run, rewards)
    for held_out in eval_sets:
        warn_of_learned_rows(prompts, held_out.prompts)
    config = build_data.with_token_ids(config, run.tokenizer)
    run = replace(run, config=config)

    # models and engine
    algorithm = config.algorithm
    policy, critic, teacher = build_ppo_roles(run, steps)
    draft = build_roles.build_draft(run, updates=steps * updates_of_a_step(config))
    ptx_loss = build_ptx_loss(run, policy, teacher)
    if not config.rollout.replay_rollouts:
        rewards.models = build_roles.build_model_rewards(run)
        start_engine(run, actor=policy.actor, draft=draft and draft.module)

    observer = observe(config, strategy)
    rewards.calls.trace = strategy.trace

    # the way from samples to experience
    kl_coefficient, entropy_coefficient = build_coefficients(algorithm)
    make_experience = build_experience_maker(
        run, policy, critic, teacher, shaper, kl_coefficient, entropy_coefficient
    )

    # the way from prompts to samples
    sampler = build_sampler(run)
    overlap = build_overlap(run, make_experience, rewards)
    scheduler = build_scheduler(run, training_data, sampler, rewards, overlap)
    rollout = (JudgedRollout if rewards.judge else ResumableRollout)(scheduler, rewards)
    watch = None
    watched: dict[str, Stateful] = {}
    if config.watch.canaries or config.watch.shadow_reward:
        watching = extra(WATCHED)
        watch = watching.watch_of(run, training_data, sampler, rewards, run_folder)
        rollout = watching.WatchedRollout(scheduler, rewards, watch)
        watched["alarms"] = watch
    items = {"collector": rollout, "reward_shaper": shaper, "kl_coefficient": kl_coefficient}
    items["watched"] = OptionalItems(watched)
    if algorithm.entropy_target is not None:
        items["entropy_coefficient"] = entropy_coefficient
    if ptx_loss is not None:
        items["mixin"] = ptx_loss
    strategy.report_memory("models and engine are ready;")

    longest = config.data.prompt_max_len + config.rollout.generate_max_len
    objective = policy_objective(algorithm, kl_coefficient, entropy_coefficient, longest=longest)
    learners = build_learners(config, policy, critic, draft, ptx_loss, objective)
    if every := config.watch.measure_noise:
        learners[-1] = extra("--measure_noise").measured(learners[-1], every)
        watched["noise"] = learners[-1].meter
    measures: list[Measure] = []
    if watch is not None:
        measures.append(watch.measure)
    replays = bool(config.rollout.replay_rollouts)
    if sections.has_episodes(config.environment) or config.engine.speculative != "none" or replays:
        measures.append(measure_turns_and_drafts)
    if config.watch.ledger:
        held_out = [prompt for each in eval_sets for prompt in each.prompts]
        book = extra("--ledger").Book(config, strategy.mesh, observer.writer, held_out)
        measures.append(book.measure)
    if config.rollout.dump_rollouts:
        dump = RecordedSamples(config.rollout.dump_rollouts, strategy.mesh)
        measures.append(partial(dump.write, writer=observer.writer))

    step_of_run: Callable[..., Step] = Step
    if replays:
        recorded = RecordedSamples(config.rollout.replay_rollouts, strategy.mesh)
        read = partial(recorded.read, prompts=prompts, never_sampled=policy.truncation.banned)
        step_of_run = partial(ReplayedStep, read=read)
    learning_step = step_of_run(
        strategy, rollout, make_experience, learners, measures=measures, trace=strategy.trace
    )
    return PPOTrainer(
        original,
        strategy,
        {each.name: each.role for each in learners},
        training_data,
        observer=observer,
        run_folder=run_folder,
        learning_step=learning_step,
        sampler=sampler,
        answer=partial(measure_sets, strategy, config.train.seed, eval_sets, sampler),
        items=items,
        ends=watch and watch.ends_run,
    )


# -- data and rewards


def check_engine(config: Config, strategy: StrategyBase) -> None:
    """Raise ConfigError for an engine that cannot read the model in INT8 or FP8."""
    if config.engine.rollout_quantization == "none":
        return
    from lightrft.engine.build import check_quantization

    code = config.model.trust_remote_code
    check_quantization(
        config.engine, config.model.pretrain, strategy.device, trust_remote_code=code
    )


def build_rewards(config: Config, strategy: StrategyBase) -> RewardRunner:
    """Build what calls the rewards of --reward.

    A judge that is the engine itself is not among the functions that worker processes call.
    """
    labels = [term.label for _, term in references.reward_model_terms(config.model)]
    terms = references.reward_terms(config.reward.reward)
    in_engine = config.reward.judge_url == references.ENGINE
    judges = [term for term in terms if in_engine and term.name == references.JUDGE]
    name = config.reward.reward
    if judges:
        name = ",".join(str(term) for term in terms if term not in judges) or "none"

    runner = RewardRunner(
        name,
        strategy.mesh.model_parallel,
        config.reward,
        chat=config.data.apply_chat_template,
        fail=strategy.fail,
        models=labels + [term.label for term in judges],
    )
    if judges:
        runner.judge = EngineJudge(judges[0], config, strategy, load_tokenizer(config.model))
    return runner


def build_eval_sets(run: Run, rewards: RewardRunner) -> list[HeldOut]:
    """Load the sets of --eval_data with the rewards that score them.

    Verifiers score benchmarks, reasoning-gym scores the named sets of its own, and `rewards` scores
    everything else.
    """
    config = run.config
    runners = {"": rewards}
    sets = []
    for source in references.eval_sources(config.data.eval_data):
        benchmark = benchmarks[source.benchmark] if source.benchmark else None
        if benchmark:
            name = benchmark.reward
        else:
            is_gym = source.name and source.source.startswith(references.REASONING_GYM)
            name = "reasoning_gym" if is_gym else ""

        # Sets with the same reward share the worker processes that compute it.
        if name not in runners:
            scoring = replace(config.reward, reward=CommaSeparated(name), reward_key=None)
            runners[name] = build_rewards(replace(config, reward=scoring), run.strategy)

        runner = runners[name]
        section = replace(config.data, eval_data=CommaSeparated(source.source))
        if benchmark:
            prompts = load_prompts(
                with_benchmark_columns(section),
                run.tokenizer,
                source="eval_data",
                row_problem=runner.row_problem,
                make=benchmark.make,
                requirements=[source.benchmark, runner.requirements],
            )
        else:
            of_set = replace(run, config=replace(config, data=section))
            prompts = build_data.load_rewarded(of_set, runner, source="eval_data")
            runner.check(prompts.examples)

        sets.append(HeldOut(source.name, prompts, runner))

    return sets


# -- models and engine


def updates_of_a_step(config: Config) -> int:
    """Return how many optimizer steps a step takes."""
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return samples // config.train.train_batch_size * config.train.max_epochs


def build_ppo_roles(run: Run, steps: int) -> tuple[Policy, Critic | None, Teacher | None]:
    """Build the policy, and the critic and the teacher if the run of so many steps needs them."""
    config = run.config
    algorithm = config.algorithm
    updates = updates_of_a_step(config)
    frozen = config.train.freezing_actor_steps
    if frozen >= steps:
        raise ConfigError(
            f"--freezing_actor_steps {frozen} leaves no step to train the actor: this run has"
            f" {steps} steps"
        )

    sampling = sampling_of(config.rollout)
    reference = sections.needs_reference(algorithm)
    # The actor's schedule counts only the steps in which it learns.
    with log_duration(run.strategy, f"loading {config.model.pretrain}"):
        policy = build_roles.build_policy(
            run, updates=(steps - frozen) * updates, reference=reference, sampling=sampling
        )

    critic = teacher = None
    if sections.needs_critic(algorithm):
        critic = build_roles.build_critic(run, updates=steps * updates)
    if algorithm.distill_coef > 0:
        teacher = build_roles.build_teacher(run, policy)
    return policy, critic, teacher


def build_ptx_loss(run: Run, policy: Policy, teacher: Teacher | None) -> PtxLoss | None:
    """Build the supervised loss on --pretrain_data, to be added to the loss on the samples."""
    config = run.config
    if not config.data.pretrain_data:
        return None

    prompts = build_data.load_supervised(run, source="pretrain_data")
    if len(prompts) < config.train.train_batch_size:
        raise ConfigError(
            f"--pretrain_data {config.data.pretrain_data}: {len(prompts)} rows do not fill one"
            f" optimizer step of --train_batch_size {config.train.train_batch_size}"
        )

    # The order is a function of the seed, so a resumed run goes on with the next rows.
    order = prompts.order(run.strategy.data_order, config.train.seed)
    return PtxLoss(run, policy, prompts, order, teacher if config.algorithm.ptx_teacher else None)


def start_engine(
    run: Run, *, actor: nn.Module | None = None, draft: nn.Module | None = None
) -> None:
    """Start the engine with the weights of `actor`, or of --pretrain without one.

    `draft` is the model that drafts, if it is trained. Raises ConfigError if the engine does not
    read the data's media.
    """
    config, strategy = run.config, run.strategy
    strategy.announce("start_engine")
    name = f"(--engine_type {config.engine.engine_type})"
    name += f" with {config.model.pretrain}" if actor is None else ""
    with log_duration(strategy, f"starting the engine {name}"):
        strategy.setup_inference_engine(config, config.engine.engine_type, actor=actor, draft=draft)
    strategy.engine.check_media(sections.media_columns(config.data))


# -- from samples to experience, and from prompts to samples


def build_coefficients(section: AlgorithmSection) -> tuple[KLCoefficient, EntropyCoefficient]:
    """Build what controls the penalty on the divergence, and the bonus of the entropy."""
    kl = KLCoefficient(section.init_kl_coef, section.kl_target, section.kl_horizon)
    entropy = EntropyCoefficient(section.entropy_coef, section.entropy_target, section.entropy_step)
    return kl, entropy


def build_experience_maker(
    run: Run,
    policy: Policy,
    critic: Critic | None,
    teacher: Teacher | None,
    shaper: RewardShaper,
    kl_coefficient: KLCoefficient,
    entropy_coefficient: EntropyCoefficient,
) -> ExperienceMaker:
    """Build what turns scored samples into experience."""
    config = run.config
    rollout = config.rollout
    routed = None
    if config.engine.router_replay:
        routed = RoutedShape.of(policy.actor.hf_model.config)
    columns = {
        "expand": run.expand,
        "first_token_apart": rollout.first_token_temperature is not None,
        "min_tokens": rollout.min_tokens,
        "routed": routed,
    }

    coefficients = config.reward.reward_model_coef
    weights = references.reward_weights(config.reward.reward, config.model, coefficients)

    return experience_maker(
        policy,
        config.algorithm,
        config.train,
        compare=compare_rewards(config.algorithm, shaper, weights),
        kl_coefficient=kl_coefficient,
        entropy_coefficient=entropy_coefficient,
        critic=critic,
        teacher=teacher,
        flatten=partial(flatten_for_run, **columns) if any(columns.values()) else flatten,
        teacher_columns=build_data.teacher_columns(config, run.tokenizer),
        num_updates=updates_of_a_step(config) if rollout.overlap else 0,
        branches=sections.has_episodes(config.environment),
    )


def build_sampler(run: Run) -> RunSampler:
    """Build what samples responses, or episodes if the run has environments or tools."""
    if sections.has_episodes(run.config.environment):
        return extra(WITH_EPISODES).episode_sampler(run.config, run.strategy, run.tokenizer)
    return RunSampler(run.strategy, run.tokenizer, run.config.rollout)


def build_overlap(
    run: Run, make_experience: ExperienceMaker, rewards: RewardRunner
) -> Overlap | None:
    """Build the thread that computes early, while other groups are still generated.

    It computes the models' outputs and the scores of reward models for complete groups. None
    without --overlap.
    """
    if not run.config.rollout.overlap:
        return None

    def compute(groups: list[Group]) -> None:
        make_experience.flatten.compute([sample for group in groups for sample in group.samples])
        if rewards.models is not None:
            rewards.models.compute_early([sample for group in groups for sample in group.responses])

    return Overlap(compute, run.strategy.device, run.strategy.trace)


def scheduler_class(run: Run) -> tuple[type[Scheduler], bool]:
    """Return the class of --scheduler, and True if it leaves out media that cannot be read.

    Raises ConfigError for a class that does not fit the flags.
    """
    config = run.config
    # Only media are read again after loading, so only they can become unreadable.
    skips = config.data.bad_rows == "skip" and run.expand is not None
    needed = "rounds" if skips or needs_rounds(config.rollout) else "fixed_batch"
    name = needed if config.rollout.scheduler == "auto" else config.rollout.scheduler
    chosen = schedulers[name]
    check_scheduler(name, chosen, config.rollout)
    if needed == "rounds" and not issubclass(chosen, Rounds):
        raise ConfigError(
            f"--scheduler {name}: only rounds, or a subclass of Rounds, knows flags such as"
            " --dynamic_sampling, --partial_rollout and --overlap"
        )
    return chosen, skips


def check_scheduler(name: str, chosen: type[Scheduler], section: RolloutSection) -> None:
    """Raise ConfigError for a class that lacks methods, or takes other arguments than a run has."""
    methods = [each for each in vars(Scheduler) if not each.startswith("_")]
    if lacking := [each for each in methods if each not in dir(chosen)]:
        raise ConfigError(f"--scheduler {name}: {chosen!r} lacks {', '.join(lacking)}")

    fields = {*vars(section), *SCHEDULER_OPTIONS}
    try:
        signature(chosen).bind(*SCHEDULER_INPUTS, **dict.fromkeys(named_by(chosen) & fields))
    except TypeError as error:
        raise ConfigError(
            f"--scheduler {name}: {chosen!r} is not made of {', '.join(SCHEDULER_INPUTS)}, keywords"
            f" such as {', '.join(SCHEDULER_OPTIONS)}, and fields of the rollout section: {error}"
        ) from error


def build_scheduler(
    run: Run,
    training_data: TrainingData,
    sampler: RunSampler,
    rewards: RewardRunner,
    overlap: Overlap | None,
) -> Scheduler:
    """Build the scheduler that chooses the prompts of a step."""
    config, strategy = run.config, run.strategy
    prompts = training_data.prompts
    chosen, skips = scheduler_class(run)
    options = {
        "section": config.rollout,
        "data": strategy.mesh.data,
        "seed": config.train.seed,
        "greedy": "greedy_rewards" in keywords(estimators[config.algorithm.advantage_estimator]),
        "order": prompts.order(strategy.data_order, config.train.seed),
        "expander": run.expand,
        "trace": strategy.trace,
        "skips_unreadable": skips,
        "overlap": overlap,
        "total_steps": training_data.total_steps,
    }

    options = vars(config.rollout) | options
    named = named_by(chosen) & options.keys()
    return chosen(sampler, rewards, prompts, **{name: options[name] for name in named})


def named_by(scheduler: type[Scheduler]) -> set[str]:
    """Return the keywords of a class and its bases: a subclass hands on what it does not name."""
    return set().union(*(keywords(cls.__init__) for cls in scheduler.__mro__))


# -- what learns


def build_learners(
    config: Config,
    policy: Policy,
    critic: Critic | None,
    draft: Draft | None,
    ptx_loss: PtxLoss | None,
    objective: PolicyObjective,
) -> list[Learner]:
    """Build the models that learn in a step, the policy last."""
    learners = []
    if critic is not None:
        learners.append(Learner("critic", critic, ValueObjective(config.algorithm), "critic"))
    if draft is not None:
        learners.append(Learner("draft", draft, sft, "draft"))

    by_prompt = config.algorithm.loss_agg_mode == "prompt-mean"
    actor = Learner(
        "actor",
        policy,
        objective,
        "train",
        first_step=config.train.freezing_actor_steps + 1,
        count=policy.with_prompts if by_prompt else None,
        further_terms=[ptx_loss.next] if ptx_loss else [],
    )
    return [*learners, actor]


# -- evaluation alone


def evaluation(config: Config, strategy: StrategyBase) -> Callable[[], dict[str, float]]:
    """Build a run of `lightrft evaluate`."""
    return partial(evaluate_sets, config, strategy, *held_out_sets(config, strategy))


def held_out_sets(
    config: Config, strategy: StrategyBase, actor: nn.Module | None = None
) -> tuple[list[HeldOut], RunSampler]:
    """Load held-out prompts and reward models, and start an engine with the weights of `pretrain`.

    `pretrain` may also be a run's folder or a checkpoint. With an `actor`, which learns, the engine
    gets its weights, and sleeps.
    """
    world = strategy.mesh.world
    config = with_merged_pretrain(with_model_of_run(config, world), world)
    if sections.has_episodes(config.environment):
        config = extra(WITH_EPISODES).with_tools(config, world)
    rewards = build_rewards(config, strategy)
    run = build_data.load_run(config, strategy, engine=True, trained=False)
    sets = build_eval_sets(run, rewards)
    if any(each.rewards is rewards for each in sets):
        rewards.models = build_roles.build_model_rewards(run)
    config = build_data.with_token_ids(config, run.tokenizer)
    engine = config.engine
    if actor is None:
        # The engine sleeps only to make room for reward models; nothing else needs the device.
        engine = replace(engine, enable_engine_sleep=rewards.models is not None)
    run = replace(run, config=replace(config, engine=engine))
    start_engine(run, actor=actor)

    return sets, build_sampler(run)
