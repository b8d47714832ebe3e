"""Build the episodes of --environment, --agent and --tools."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.errors import ConfigError
from lightrft.config.references import reward_terms
from lightrft.config.sections import Config, has_episodes
from lightrft.data.rendering.template import template_variables, turn_end_ids
from lightrft.engine.build import load_tool_parsers
from lightrft.engine.model_info import end_token_ids, placeholder_token_ids
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.episodes import Episodes
from lightrft.extras.agents.messages import RANGES, ToolCall
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.recording import Recording
from lightrft.extras.agents.tool_calls import Parse, after_thinking, hermes, read_call
from lightrft.extras.agents.tools import schemas
from lightrft.extras.agents.turn_format import TurnFormat
from lightrft.extras.episode_sampler import EpisodeSampler
from lightrft.models.parallel.collectives import Axis
from lightrft.models.qwen_omni import load_config
from lightrft.strategy.strategy import StrategyBase


def program_setup(config: Config) -> ProgramSetup:
    section = config.environment
    memory = int(section.environment_memory_gb * 1e9)
    names = section.environment, tuple(section.tools), section.agent
    return ProgramSetup(*names, served_model(config), section.tool_seconds, memory)


def served_model(config: Config) -> EndpointModel:
    """Return what the servers of agents tell about the model."""
    rollout = config.rollout
    longest = config.data.prompt_max_len + config.rollout.generate_max_len
    sampling = {name: getattr(rollout, name) for name in RANGES}
    ends = _end_token_ids(config).union(rollout.stop_token_ids)
    refuses = config.environment.agent_sampling == "refuse"
    name = Path(config.model.pretrain).name
    records = bool(config.environment.agent_record)
    return EndpointModel(name, longest, sampling, ends, records=records, refuses=refuses)


def _end_token_ids(config: Config) -> frozenset[int]:
    return end_token_ids(config.model.pretrain, _model_config(config))


def _model_config(config: Config) -> PretrainedConfig:
    return load_config(config.model.pretrain, trust_remote_code=config.model.trust_remote_code)


def with_tools(config: Config, world: Axis) -> Config:
    """Add the schemas of all tools to the variables of the chat template; all ranks call this.

    They are those that rank 0 has read: a server may describe its tools otherwise each time, and
    ranks with other prompts would not sample the same. Raises ConfigError if the environment or a
    tool cannot be imported or described.
    """
    tools, problem = world.broadcast(_described(config) if world.rank == 0 else None)
    if problem:
        raise ConfigError(problem)

    if not tools:
        return config
    if not config.data.apply_chat_template:
        raise ConfigError("tools are described by the chat template: set --apply_chat_template")

    # The schemas become part of the configuration, so every reader of it renders the same prompt.
    variables = template_variables(config.data) | {"tools": tools}
    return replace(config, data=replace(config.data, chat_template_kwargs=json.dumps(variables)))


def _described(config: Config) -> tuple[list[dict[str, Any]], str]:
    """Return the schemas of all tools, and why there are none."""
    try:
        return schemas(program_setup(config).program().all_tools), ""
    except ValueError as error:
        return [], str(error)


def episode_sampler(config: Config, strategy: StrategyBase, tokenizer: Tokenizer) -> EpisodeSampler:
    """Build what samples episodes with the program of --environment, --agent or --tools."""
    # On an accelerator, other kernels differ from run to run too, unless the user asks for it.
    together = strategy.device.type == "cpu" or config.strategy.deterministic
    if together:
        strategy.print(
            "turns begin when all programs have asked for theirs, so that the run repeats to the last"
            " bit unless an agent asks for several at once; time/generate/tools is the engine's wait"
        )
    episodes = new_episodes(config, tokenizer, recording(config, strategy.mesh.world))
    return EpisodeSampler(strategy, tokenizer, config.rollout, episodes, together=together)


def recording(config: Config, world: Axis) -> Recording | None:
    """Open the file of --agent_record. Raises ConfigError if it cannot be written."""
    path = config.environment.agent_record
    if not path:
        return None
    try:
        file = Path(path).expanduser()
        if world.size > 1:
            file = file.with_suffix(f".rank{world.rank}{file.suffix}")
        return Recording(file)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--agent_record {path}: {error}; name a new file") from error


def new_episodes(
    config: Config, tokenizer: Tokenizer, recording: Recording | None = None
) -> Episodes:
    section = config.environment
    placeholders = placeholder_token_ids(_model_config(config))
    # Both the model's configuration and the chat template know tokens that end a turn.
    ends = _end_token_ids(config) | turn_end_ids(config.data, tokenizer)
    format = TurnFormat(config.data, tokenizer, ends, placeholders)
    parse = build_parser(config, tokenizer)
    longest = config.rollout.generate_max_len

    limits = {"longest": longest, "other_rewards": _other_rewards(config)}
    return Episodes(program_setup(config), section, format, parse, **limits, recording=recording)


def _other_rewards(config: Config) -> str:
    """Return --reward if it would ignore the environment's rewards, or "".

    Functions of the user may read those rewards themselves.
    """
    names = [term.name for term in reward_terms(config.reward.reward)]
    reads_them = "environment" in names or any(":" in name for name in names)
    return "" if reads_them or not has_episodes(config.environment) else config.reward.reward


def build_parser(config: Config, tokenizer: Tokenizer) -> Parse:
    """Return the function that reads tool calls; raises ConfigError for an unknown name."""
    name = config.environment.tool_parser
    if name == "hermes":
        return hermes
    # Other parsers belong to the engine, so their names depend on it.
    try:
        find = load_tool_parsers(config.engine.engine_type)
        parse = find(name, tokenizer, template_variables(config.data).get("tools", []))
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def read(text: str) -> tuple[str, list[ToolCall]]:
        content, calls = parse(text)
        return content, [read_call(*call) for call in calls]

    return after_thinking(read)
