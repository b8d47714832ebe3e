"""Build the server for clients of Tinker: a policy that learns, an engine, and a door."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.checkpoint.final_model import with_merged_pretrain
from lightrft.config.errors import ConfigError
from lightrft.config.references import MODEL_KEY
from lightrft.config.sections import Config
from lightrft.models.heads import rope_window
from lightrft.run.observation import log_duration
from lightrft.strategy.strategy import Strategy
from lightrft.trainer.build_roles import build_policy

if TYPE_CHECKING:
    from lightrft.tinker.server import TinkerServer

MOST_ADAPTERS = 16
"""Adapters that clients can train at the same time."""
SNAPSHOTS = {"full": 2, "adapters": 16}
"""Copies of earlier weights that clients can go on to sample from, in host memory."""


def tinker_server(config: Config, strategy: Strategy) -> "TinkerServer":
    """Load the model, start the engine with it, and build the server that listens."""
    try:
        from lightrft.tinker.door import Door, Served
        from lightrft.tinker.protocol import Limits
        from lightrft.tinker.server import TinkerServer
        from lightrft.tinker.worker import Worker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lightrft tinker needs {error.name}: pip install lightrft[tinker]"
        ) from error

    pretrain = config.model.pretrain
    config = with_merged_pretrain(config, strategy.mesh.world)
    with log_duration(strategy, f"loading {pretrain}"):
        policy = build_policy(config, strategy, updates=1, reference=False)
    strategy.announce("start_engine")
    with log_duration(strategy, f"starting the engine (--engine_type {config.engine.engine_type})"):
        strategy.host.start(config, config.engine.engine_type, actor=policy.actor)

    adapters = config.model.lora_rank > 0
    folder = Path(config.train.save_path) / "checkpoints"
    worker = Worker(
        policy,
        config.train,
        folder,
        num_snapshots=SNAPSHOTS["adapters" if adapters else "full"],
        seed=config.train.seed,
    )
    train = config.train
    rows = [
        train.max_tokens_per_microbatch,
        train.max_tokens_per_logprob_microbatch,
        rope_window(policy.actor.language_model),
    ]
    vocabulary = strategy.host.engine.vocabulary
    limits = Limits(
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
    return TinkerServer(strategy, worker, Door(served), config.server)
