"""Build the server of a model that does not learn."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrft.checkpoint.final_model import with_merged_pretrain, with_model_of_run
from lightrft.config.errors import ConfigError
from lightrft.config.sections import Config
from lightrft.models.load import load_tokenizer
from lightrft.rollout.episode_sampler import EpisodeSampler
from lightrft.run.observation import log_duration
from lightrft.strategy.strategy import Strategy
from lightrft.trainer.build_episodes import new_episodes, served_model, with_token_ids

if TYPE_CHECKING:
    from lightrft.run.model_server import ModelServer


def model_server(config: Config, strategy: Strategy) -> "ModelServer":
    """Start an engine with the weights of `pretrain`, and build the server that listens.

    `pretrain` may be a run's folder or a checkpoint.
    """
    try:
        from lightrft.run.model_server import ModelServer
    except ModuleNotFoundError as error:
        raise ConfigError(f"lightrft serve needs {error.name}: pip install '.[agents]'") from error

    world = strategy.mesh.world
    config = with_merged_pretrain(with_model_of_run(config, world), world)
    tokenizer = load_tokenizer(config.model)
    # Clients decide how many turns a conversation has, and they always send messages.
    section = replace(config.environment, max_turns=sys.maxsize)
    config = with_token_ids(
        replace(config, data=replace(config.data, apply_chat_template=True)), tokenizer
    )
    strategy.announce("start_engine")

    with log_duration(
        strategy,
        f"starting the engine (--engine_type {config.engine.engine_type}) with"
        f" {config.model.pretrain}",
    ):
        strategy.host.start(
            replace(config, engine=replace(config.engine, enable_engine_sleep=False))
        )

    episodes = new_episodes(replace(config, environment=section), tokenizer)
    sampler = EpisodeSampler(strategy, tokenizer, config.rollout, episodes)
    return ModelServer(
        strategy,
        sampler,
        replace(served_model(config), fixed={}),
        config.server,
        seed=config.train.seed,
    )
