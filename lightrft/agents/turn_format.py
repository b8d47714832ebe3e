"""The tokens between two turns of the model: what ends its turn, what it reads, and what begins its next turn.

Turns of the model are never rendered or tokenized again, since that can give other tokens than those that were sampled. The text
between two turns is what the chat template writes between a short turn in their place and the next one.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from lightrft.agents.messages import BEGINNING, Message, TurnRequest
from lightrft.config.sections import DataSection
from lightrft.data.prompts import INPUT, render, template_variables
from lightrft.types import Prompt

TURN = "\u2402turn\u2403"
"""Text of a turn in whose place another one was sampled; no template contains it."""
LONGEST_KNOWN = 2048
"""Number of letters of the longest text whose tokens are kept: long observations seldom come again.
"""


class TurnFormat:
    """Rendering of observations. Without a chat template they are plain text."""

    def __init__(
        self,
        section: DataSection,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: frozenset[int],
        placeholder_token_ids: Collection[int] = (),
    ):
        """Set up the rendering. `placeholder_token_ids` represent media in prompts; observations cannot have them."""
        self.section, self.tokenizer, self.end_token_ids = section, tokenizer, end_token_ids
        self.placeholder_token_ids = frozenset(placeholder_token_ids)
        self._known: dict[str, list[int]] = {}

    def prompt(self, prompt: Prompt, request: TurnRequest) -> Prompt:
        """Return the prompt of a conversation: that of the row with the first observation, whose text is at the end of its last
        message; the observation alone if the request begins a conversation of its own.

        Raises ValueError if it becomes longer than --prompt_max_len.
        """
        observation = request.observation
        if request.after == BEGINNING:
            token_ids = self._observation_tokens(request)
            text = self.tokenizer.decode(token_ids)
        elif not observation:
            return prompt
        elif isinstance(observation, str):
            value = _append_text(prompt.columns[INPUT], observation)
            text = render(self.section, self.tokenizer, value)
            special_tokens = not self.section.apply_chat_template
            token_ids = self._expand_media(self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
        else:
            token_ids = [*prompt.token_ids, *self.tokens(request, None)]
            text = self.tokenizer.decode(token_ids)
        if len(token_ids) > self.section.prompt_max_len:
            raise ValueError(f"the prompt with the first observation has {len(token_ids)} tokens, more than --prompt_max_len "
                             f"{self.section.prompt_max_len}")  # fmt: skip
        return replace(prompt, text=text, token_ids=token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a turn without its end, with other special tokens, which may mark tool calls."""
        ended = bool(token_ids) and token_ids[-1] in self.end_token_ids
        return self.tokenizer.decode(token_ids[:-1] if ended else token_ids)

    def tokens(self, request: TurnRequest, last_token: int | None) -> list[int]:
        """Return the tokens of an observation after a turn whose last token is `last_token`.

        Raises ValueError if the chat template rejects it.
        """
        observation = request.observation or ""
        if _are_token_ids(observation):
            return self._in_vocabulary(observation)
        if request.plain or not self.section.apply_chat_template:
            contents = [observation] if isinstance(observation, str) else [each["content"] for each in observation]
            return self._tokenize("".join(contents))
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        token_ids = self._tokenize(self._between(messages, request))
        ended = last_token in self.end_token_ids and token_ids[:1] and token_ids[0] in self.end_token_ids
        return token_ids[1:] if ended else token_ids

    def _observation_tokens(self, request: TurnRequest) -> list[int]:
        observation = request.observation or ""
        if isinstance(observation, str):
            return self._expand_media(self.tokenizer(observation)["input_ids"])
        if _are_token_ids(observation):
            return self._in_vocabulary(observation)
        if not self.section.apply_chat_template:
            raise ValueError("messages are rendered by the chat template: set --apply_chat_template")
        return self._tokenize(self._render(observation, request))

    def _between(self, messages: list[Message], request: TurnRequest) -> str:
        """Return the text from the end of a turn to the beginning of the next one, with these messages between them."""
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *messages], request)
        _, marker, between = text.rpartition(TURN)
        if not marker:
            raise ValueError("the chat template leaves out the turns of the assistant before the last message")
        return between

    def _render(self, messages: list[dict[str, Any]], request: TurnRequest) -> str:
        variables = template_variables(self.section)
        for message in messages:
            if isinstance(content := message.get("content"), list) and any(part.get("type") != "text" for part in content):
                raise ValueError("an observation is text: images, videos and sound cannot be observed")
        if request.tools:
            variables["tools"] = [*variables.get("tools", []), *request.tools]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        except Exception as error:  # a template is a program and raises its own errors
            raise ValueError(f"the chat template rejects the messages ({type(error).__name__}: {error})") from error

    def _in_vocabulary(self, token_ids: list[int]) -> list[int]:
        size = len(self.tokenizer)
        if outside := [token for token in token_ids if not 0 <= token < size]:
            raise ValueError(f"token {outside[0]} is not one of the {size} of the tokenizer")
        if self.placeholder_token_ids.intersection(token_ids):
            raise ValueError("an observation is text: its tokens contain a placeholder of an image, a video or sound")
        return list(token_ids)

    def _tokenize(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            token_ids = self._expand_media(
                self.tokenizer(text, add_special_tokens=False)["input_ids"]
            )
            if len(text) > LONGEST_KNOWN:
                return token_ids
            self._known[text] = token_ids
        return self._known[text]

    def _expand_media(self, token_ids: list[int]) -> list[int]:
        """Return the tokens with placeholders of media replaced by those of their letters, for texts that mention `<image>`.

        Raises ValueError if the tokenizer cannot split them.
        """
        if not self.placeholder_token_ids.intersection(token_ids):
            return token_ids
        spelled: list[int] = []
        for token in token_ids:
            if token in self.placeholder_token_ids:
                text = self.tokenizer.convert_ids_to_tokens(token)
                spelled += self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            else:
                spelled.append(token)
        return self._in_vocabulary(spelled)


def _are_token_ids(observation: str | list[Message] | list[int]) -> TypeGuard[list[int]]:
    return not isinstance(observation, str) and all(isinstance(each, int) for each in observation)


def _append_text(value: Any, observation: str) -> Any:
    """Return the input of a row with a text at the end of its last message."""
    if isinstance(value, str):
        return f"{value}{observation}"
    return [*value[:-1], {**value[-1], "content": f"{value[-1]['content']}{observation}"}]
