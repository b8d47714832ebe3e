"""A reward function on a server, perhaps on another machine.

    POST URL  {"query": [prompt and response], "prompts": [...], "responses": [...], "labels":
        [...]}
    ->        {"rewards": [...]}

There is one request for each prompt, with all responses; a reward is anything that a local
function may return for a sample.
"""

from typing import Any

from lightrft.algorithms.roles.endpoint import Endpoint
from lightrft.config.references import REWARD_KEY
from lightrft.core.samples import Sample


class RemoteReward:
    """Reward function on a server.

    Raises ValueError for a server that stays away, or returns something else.
    """

    def __init__(self, url: str, **limits: float):
        """Connect to the server. `limits` go to Endpoint()."""
        self._server = Endpoint("--reward", url, REWARD_KEY, **limits)

    def __call__(
        self, samples: list[Sample], label: list[Any] | None = None, **_: Any
    ) -> list[Any]:
        prompts = [sample.prompt.text for sample in samples]
        responses = [sample.text for sample in samples]
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        request = {
            "query": queries,
            "prompts": prompts,
            "responses": responses,
            "labels": label or [None] * len(samples),
        }

        answer = self._server.ask("POST", request=request)
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise ValueError(f'the response is not {{"rewards": [...]}}: {answer!r:.200}')
        return answer["rewards"]
