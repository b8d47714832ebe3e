"""Convert samples to rows of samples.jsonl, for people and for programs."""

from typing import Any

from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.observe.sinks import BRANCHES, PROMPT_IDS, RESPONSE_IDS, SOUNDS, THUMBNAILS
from lightrft.types import Episode, Sample


def sample_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return a row for each sample.

    Thumbnails and sound of a prompt are in the first row of the group.
    """
    rows = []
    groups = set()
    for sample in samples:
        rows.append(_row(sample, first=sample.group not in groups))
        groups.add(sample.group)
    return rows


def _row(sample: Sample, *, first: bool) -> dict[str, Any]:
    prompt = sample.prompt
    media = prompt.multi_modal if first else {}
    pictures = [item.thumbnail() for medium in (IMAGES, VIDEOS) for item in media.get(medium, ())]
    sounds = [item.player() for item in media.get(AUDIOS, ())]

    return {
        "group": sample.group,
        "prompt": prompt.text,
        **{medium: [item.name for item in items] for medium, items in prompt.multi_modal.items()},
        "response": sample.text,
        "label": prompt.columns.get("label"),
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "length": len(sample.token_ids),
        PROMPT_IDS: list(prompt.token_ids),
        RESPONSE_IDS: sample.token_ids,
        **(_episode(sample.episode) if sample.episode else {}),
        **({THUMBNAILS: pictures} if pictures else {}),
        **({SOUNDS: sounds} if sounds else {}),
    }


def _episode(episode: Episode) -> dict[str, Any]:
    branches = [branch.episode.messages for branch in episode.branches]
    return {"messages": episode.messages, "problem": episode.problem} | (
        {BRANCHES: branches} if branches else {}
    )
