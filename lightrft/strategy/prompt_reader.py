"""Read prompts and media in users' formats as requests of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lightrft.core.engine import Request
from lightrft.data.rendering.tokens import text_tokens
from lightrft.engine.media import MEDIA_NAMES, is_clip
from lightrft.engine.model_info import Vocabulary

MediaItems = tuple[list | None, list[int] | None]
"""Items of one medium, and how many belong to each prompt if the list is flat."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    vocabulary: Vocabulary | None
    special_tokens: bool
    """True if the tokenizer adds special tokens to text; a chat template has already written them.
    """

    def requests(
        self,
        token_ids: list[list[int]] | None,
        texts: list[str] | None,
        media: Mapping[str, MediaItems],
    ) -> list[Request]:
        """Return a request for each prompt, from text if there are media or no ids, else from ids.

        Raises ValueError if there are no prompts, or if the media do not match the prompts.
        """
        has_media = any(item is not None for items, _ in media.values() for item in items or ())
        # Media belong to placeholders of the text, so ids without them cannot be used.
        if texts is not None and (token_ids is None or has_media):
            prompts = [self.tokens(text) for text in texts]
        elif token_ids is not None:
            prompts = token_ids
        else:
            raise ValueError(
                "there are no prompts: give all_prompt_token_ids, all_prompts or requests"
            )

        of_prompts = {
            name: per_prompt(items, counts, len(prompts), name)
            for name, (items, counts) in media.items()
        }
        return [
            self.request(ids, {name: items[index] for name, items in of_prompts.items()})
            for index, ids in enumerate(prompts)
        ]

    def local_requests(
        self, token_ids: list[list[int]] | None, inputs: list[dict[str, Any]] | None
    ) -> list[Request]:
        """Return one request for each prompt; each of `inputs` contains the media of a prompt."""
        if (token_ids is None) == (inputs is None):
            raise ValueError("give prompt_token_ids or multi_modal_inputs, and only one of them")
        if inputs is None:
            return [self.request(ids, {}) for ids in token_ids]
        return [self.local(one) for one in inputs]

    def local(self, prompt: Mapping[str, Any]) -> Request:
        data = prompt.get("multi_modal_data") or {}
        unknown = [
            *(prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"}),
            *(data.keys() - set(MEDIA_NAMES.values())),
        ]

        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise ValueError(
                "a multi-modal input has prompt or prompt_token_ids, and multi_modal_data with"
                " image, video or audio, not"
                f" {', '.join(prompt)}{f' with {unknown[0]}' if unknown else ''}"
            )

        ids = self.tokens(prompt["prompt"]) if "prompt" in prompt else prompt["prompt_token_ids"]
        media = {name: as_list(data.get(medium)) for name, medium in MEDIA_NAMES.items()}
        return self.request(ids, media)

    def request(self, token_ids: list[int], media: Mapping[str, list]) -> Request:
        """Build a request; placeholders of a medium without items are removed."""
        token_ids = list(token_ids)
        for name, medium in MEDIA_NAMES.items():
            if not media.get(name):
                token_ids = self.vocabulary.without_placeholders(token_ids, medium)
        return Request(token_ids, {name: items for name, items in media.items() if items})

    def tokens(self, text: str) -> list[int]:
        return text_tokens(self.vocabulary.tokenizer, text, special_tokens=self.special_tokens)


def per_prompt(
    items: list | None, counts: list[int] | None, num_prompts: int, name: str
) -> list[list]:
    """Return a list of items for each prompt.

    `items` has one entry for each prompt (a list, one item or None), or is flat and has `counts`.
    """
    if items is None:
        return [[] for _ in range(num_prompts)]

    if counts is None:
        if len(items) != num_prompts:
            raise ValueError(
                f"all_{name} has {len(items)} entries for {num_prompts} prompts: one list for each"
                f" prompt, or all in one list with {name}_num"
            )
        return [as_list(one) for one in items]

    if len(counts) != num_prompts or sum(counts) != len(items):
        raise ValueError(
            f"{name}_num counts {sum(counts)} {name} of {len(counts)} prompts, "
            f"and there are {len(items)} of {num_prompts}"
        )

    ends = list(accumulate(counts))
    return [list(items[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def as_list(items: Any) -> list:
    """Return a list of the items: empty for None, with one element for a single item."""
    several = isinstance(items, list | tuple) and not is_clip(items)
    return [] if items is None else list(items) if several else [items]
