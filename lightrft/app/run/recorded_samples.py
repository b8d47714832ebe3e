"""Write the samples of a run to files, and learn from them again without an engine.

The flags are --dump_rollouts and --replay_rollouts.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.app.observe.sinks import Writer
from lightrft.config.errors import DataError
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Episode, Prompt, Sample
from lightrft.models.parallel.mesh import Mesh
from lightrft.strategy.checkpoint.atomic import write_file

SAMPLE_FIELDS = tuple(
    field.name
    for field in fields(Sample)
    if field.name not in ("prompt", "drafts", "episode", "experts")
)
"""Fields that are written as they are. Experts are left out: they are many times the rest."""
EPISODE_FIELDS = tuple(
    field.name for field in fields(Episode) if field.name not in ("branches", "rewards")
)


class RecordedSamples:
    """A folder with the samples of each step and replica: `step_000001/replica_0_of_2.jsonl`.

    The first line of a file has the version of the weights that the engine had, each other line a
    sample with the rewards. For a prompt it has the index and the tokens; columns and media come
    from the data of the run that reads it.
    """

    def __init__(self, folder: str, mesh: Mesh):
        self.folder = Path(folder).expanduser()
        self.mesh = mesh

    def write(
        self, step: int, samples: list[Sample], version: int, metrics: Metrics, *, writer: Writer
    ) -> None:
        """Let the writer write the samples of this rank's replica; it is a measure of a step."""
        if not self.mesh.model_parallel.rank:
            lines = [{"version": version}, *map(_as_json, samples)]
            writer.submit(partial(self._write, step, lines))

    def _write(self, step: int, lines: Sequence[dict[str, Any]]) -> None:
        self._file(step).parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file(step), "".join(json.dumps(line) + "\n" for line in lines).encode())

    def read(
        self, step: int, prompts: Sequence[Prompt], never_sampled: Collection[int] = ()
    ) -> tuple[list[Sample], int]:
        """Return the samples of this rank's replica and the version of the weights.

        Raise DataError if they are not there, or contain a token that the policy does not sample:
        it has no log-prob.
        """
        try:
            first, *lines = self._file(step).read_text().splitlines() or [""]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"--replay_rollouts {self.folder} has no samples of step {step} for"
                f" {self.mesh.data.size} replicas of data ({error}); replay at most the steps that"
                " were dumped, on the same number of replicas"
            ) from error

        samples: list[Sample] = []
        number = 1
        try:
            version = int(json.loads(first)["version"])
            for line in lines:
                number += 1
                samples.append(sample_of_json(json.loads(line), prompts))
                if unknown := sorted(set(samples[-1].token_ids).intersection(never_sampled)):
                    raise ValueError(f"the policy never samples the token {unknown[0]}")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(
                f"--replay_rollouts {self._file(step)}:{number} is no line of a dump"
                f" ({type(error).__name__}: {error})"
            ) from error

        return samples, version

    def _file(self, step: int) -> Path:
        data = self.mesh.data
        return self.folder / f"step_{step:06d}" / f"replica_{data.rank}_of_{data.size}.jsonl"


def _as_json(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    episode = sample.episode
    row = {name: getattr(sample, name) for name in SAMPLE_FIELDS} | {"drafts": list(sample.drafts)}
    row["prompt"] = {"index": prompt.index, "text": prompt.text, "token_ids": [*prompt.token_ids]}

    if episode is not None:
        row["episode"] = {name: getattr(episode, name) for name in EPISODE_FIELDS} | {
            "rewards": episode.rewards,
            "branches": list(map(_as_json, episode.branches)),
        }

    return row


def sample_of_json(
    values: dict[str, Any], prompts: Sequence[Prompt] | Mapping[int, Prompt]
) -> Sample:
    """Return a recorded sample; `prompts` has the prompts by index."""
    prompt = values.pop("prompt")
    episode = values.pop("episode", None)
    recorded = prompts[prompt["index"]]
    # An environment may have added its first observation to the prompt.
    if list(recorded.token_ids) != prompt["token_ids"]:
        recorded = replace(recorded, text=prompt["text"], token_ids=prompt["token_ids"])

    if episode is not None:
        branches = [sample_of_json(branch, prompts) for branch in episode.pop("branches")]
        episode = Episode(
            **episode | {"rewards": [tuple(each) for each in episode["rewards"]]}, branches=branches
        )

    return Sample(
        prompt=recorded, episode=episode, **values | {"drafts": Drafts(*values["drafts"])}
    )
