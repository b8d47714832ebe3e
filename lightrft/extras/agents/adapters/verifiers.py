"""Environments of the package verifiers as programs of episodes.

`--environment verifiers:NAME --prompt_data verifiers:NAME`: an environment runs in the worker of
the episode. The agents send chats to the episode's own server, as in an evaluation with the
package. The package's training client would tokenize chats itself. If that gave other tokens than
were sampled, the turn would begin a branch. The server has the sampled tokens, the run's chat
template, and the parser of tool calls.
"""

import os
from statistics import fmean
from typing import Any

from verifiers.v1 import Env, Episode, EvalClientConfig, ModelContext, SamplingConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment

from lightrft.data.verifiers.tasksets import TASK, parse
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.endpoint.server import serving
from lightrft.extras.agents.session import EpisodeProgram, Session
from lightrft.registry import kept_alive

EPISODE_KEY_VARIABLE = "LIGHTRFT_EPISODE_API_KEY"
"""Environment variable with the key of an episode's server.

The package keeps names with API_KEY from the programs of agents.
"""

ERROR_END = 700
"""Letters at the beginning and at the end of a long error that are reported."""


def program(reference: str, served: EndpointModel) -> EpisodeProgram:
    """Return the program that runs an episode about the task of a row, and returns the reward.

    Only one agent can learn: raises ValueError if the model would be several of the environment's
    agents, or if the environment cannot be loaded.
    """
    try:
        with kept_alive():
            config, _ = parse(reference)
            environment = load_environment(config)
    except Exception as error:  # the environment's own code may raise anything
        raise ValueError(
            f"--environment verifiers:{reference}: {type(error).__name__}: {error}"
        ) from error

    learners = [role for role, agent in agent_config_fields(config).items() if agent.client is None]
    if len(learners) != 1:
        raise ValueError(
            f"--environment verifiers:{reference}: the model would be"
            f" {' and '.join(learners) or 'none'} of its agents, not one; give the others an"
            " endpoint: judge.model=...&judge.client.type=eval&judge.client.base_url=..."
        )

    async def play(session: Session, row: dict[str, Any]) -> float | None:
        async with serving(session, served) as address, environment.serving():
            os.environ[EPISODE_KEY_VARIABLE] = address.key
            client = EvalClientConfig(base_url=address.url, api_key_var=EPISODE_KEY_VARIABLE)
            context = ModelContext(served.name, client, SamplingConfig(**served.fixed))
            episode = await environment.run_episode(_task(environment, row), context)

        if not (session.limited or environment.complete(episode)):
            raise RuntimeError(f"verifiers: {_problem(episode)}")
        return _reward(episode, learners[0])

    return play


def _task(environment: Env, row: dict[str, Any]) -> Any:
    """Return the task of a row. Raises ValueError for a row of other data."""
    if TASK not in row:
        raise ValueError(
            "the row has no task of verifiers: its data is --prompt_data verifiers:NAME"
        )
    kind = type(environment.taskset).task_type()
    return kind(kind.data_type().model_validate(row[TASK]), environment.config.taskset.task)


def _problem(episode: Episode) -> str:
    """Return the first error of an episode; errors of attempts that were repeated are none."""
    failed = [error for trace in episode.traces if not trace.ok for error in trace.errors]
    for error in [*episode.errors, *failed]:
        text = error.message.strip()
        if len(text) > 2 * ERROR_END:  # what was done, and the end of a traceback
            text = f"{text[:ERROR_END]} ... {text[-ERROR_END:]}"
        return f"{error.type}: {text}"
    return "its environment does not take the episode for a complete one"


def _reward(episode: Episode, learner: str) -> float | None:
    """Return the reward of the model's agent: the mean of its traces.

    An agent that runs several times, as in best-of-n, has a trace of each run. They are one sample,
    and the mean is what all of them together are worth. None if a limit of the episode ended it
    before it was scored.
    """
    traces = [trace for trace in episode.traces if trace.agent.name in (None, "", learner)]
    return fmean(trace.reward for trace in traces) if traces else None
