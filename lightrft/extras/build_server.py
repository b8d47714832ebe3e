"""Build the servers: of a model that does not learn, and of one that Tinker clients train."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.app.run.observation import log_duration
from lightrft.app.run.resume_check import identity
from lightrft.app.run.run import Run
from lightrft.app.trainer.build import start_engine
from lightrft.app.trainer.build_data import with_token_ids
from lightrft.app.trainer.build_roles import build_frozen_reward_model, build_policy
from lightrft.config.errors import ConfigError
from lightrft.config.references import MODEL_KEY, reward_model_terms
from lightrft.config.sections import Config
from lightrft.data.prompt_set import PromptSet
from lightrft.extras.build_episodes import new_episodes, served_model
from lightrft.extras.episode_sampler import EpisodeSampler
from lightrft.models.heads import rope_window
from lightrft.models.load import load_tokenizer
from lightrft.models.weight_files import weights_of
from lightrft.rewards.steps import StepRewards
from lightrft.strategy.checkpoint.final_model import with_merged_pretrain, with_model_of_run
from lightrft.strategy.strategy import StrategyBase

if TYPE_CHECKING:
    from lightrft.extras.model_server import ModelServer
    from lightrft.extras.reward_server import RewardServer

MOST_ADAPTERS = 16
"""Adapters that clients can train at the same time."""
SNAPSHOTS = {"full": 2, "adapters": 16}
"""Copies of earlier weights that clients can go on to sample from, in host memory."""


@contextmanager
def needing(packages: str, command: str) -> Iterator[None]:
    """Say what to install for a command if a package is missing inside."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lightrft {command} needs {error.name}: pip install '.[{packages}]'"
        ) from error


def model_server(config: Config, strategy: StrategyBase) -> "ModelServer":
    """Start an engine with the weights of `pretrain`, and build the server that listens.

    `pretrain` may be a run's folder or a checkpoint.
    """
    with needing("agents", "serve"):
        from lightrft.extras.model_server import ModelServer

    world = strategy.mesh.world
    config = with_merged_pretrain(with_model_of_run(config, world), world)
    tokenizer = load_tokenizer(config.model)
    # Clients decide how many turns a conversation has, and they always send messages.
    unlimited = sys.maxsize
    section = replace(config.environment, max_turns=unlimited, agent_branches=unlimited)
    config = with_token_ids(
        replace(config, data=replace(config.data, apply_chat_template=True)), tokenizer
    )
    awake = replace(config.engine, enable_engine_sleep=False)
    start_engine(Run(replace(config, engine=awake), strategy))

    episodes = new_episodes(replace(config, environment=section), tokenizer)
    sampler = EpisodeSampler(strategy, tokenizer, config.rollout, episodes)
    served = replace(served_model(config), fixed={})
    return ModelServer(strategy, sampler, served, config.server, config.train.seed)


def reward_server(config: Config, strategy: StrategyBase) -> "RewardServer":
    """Build the frozen reward models, each with its tokenizer, and the server."""
    with needing("agents", "serve_reward"):
        from lightrft.extras.reward_server import RewardServer, ServedModel

    models = []
    for flag, term in reward_model_terms(config.model):
        tokenizer = load_tokenizer(replace(config.model, pretrain=term.name))
        steps = None
        if flag == "process_reward_pretrain":
            steps = StepRewards(tokenizer, config.data.step_separator, config.reward.step_rewards)
        role = build_frozen_reward_model(Run(config, strategy), flag, term.name)
        models.append(ServedModel(term.label, role, tokenizer, term.weight, steps))
    return RewardServer(strategy, models, config.server)


def tinker_server(config: Config, strategy: StrategyBase) -> Any:
    """Load the model, start the engine with it, and build the server that listens."""
    with needing("tinker", "tinker"):
        from lightrft.extras.tinker.frontend import Frontend, Served
        from lightrft.extras.tinker.protocol import RequestLimits
        from lightrft.extras.tinker.server import TinkerServer
        from lightrft.extras.tinker.worker import TinkerWorker

    pretrain = config.model.pretrain
    config = with_merged_pretrain(config, strategy.mesh.world)
    with log_duration(strategy, f"loading {pretrain}"):
        policy = build_policy(Run(config, strategy), updates=1, reference=False)
    start_engine(Run(config, strategy), actor=policy.actor)

    adapters = config.model.lora_rank > 0
    folder = Path(config.train.save_path) / "checkpoints"
    model = policy.actor.language_model
    weights = strategy.mesh.world.broadcast(
        weights_of(model.name_or_path) if strategy.is_rank_0() else ""
    )
    fingerprints = {"actor": weights} if weights else {}
    worker = TinkerWorker(
        policy,
        config.train,
        folder,
        identity=identity(config, model.config, PromptSet([]), fingerprints),
        num_snapshots=SNAPSHOTS["adapters" if adapters else "full"],
    )
    train = config.train
    rows = [
        train.max_tokens_per_microbatch,
        train.max_tokens_per_logprob_microbatch,
        rope_window(model),
    ]
    vocabulary = strategy.engine.vocabulary
    limits = RequestLimits(
        vocabulary.size,
        frozenset(vocabulary.placeholder_token_ids),
        longest_row=min(size for size in rows if size is not None),
        longest_sequence=config.data.prompt_max_len + config.rollout.generate_max_len,
        longest_response=config.rollout.generate_max_len,
    )
    served = Served(
        pretrain,
        config.model.lora_rank,
        most_models=MOST_ADAPTERS if adapters else 1,
        seed=config.train.seed,
        folder=folder,
        limits=limits,
        key=os.environ.get(MODEL_KEY, ""),
    )
    return TinkerServer(strategy, worker, Frontend(served), config.server)
