"""The tokens between two turns of the model.

They end one turn, hold what the model reads, and begin the next turn. Turns of the model are never
rendered or tokenized again, since that can give other tokens than were sampled. The text between
two turns is what the chat template writes between a short stand-in for the turn and the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from lightrft.config.sections import DataSection
from lightrft.core.samples import Prompt
from lightrft.data.columns.values import plain
from lightrft.data.prompts import INPUT, prompt_text
from lightrft.data.rendering.messages import THINKING, as_messages, as_object, as_tools
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import text_tokens
from lightrft.extras.agents.messages import BEGINNING, Message, ToolCall, TurnRequest
from lightrft.extras.agents.tool_calls import Parse

TURN = "\u2402turn\u2403"
"""Text that stands in for a sampled turn; no template contains it."""
NO_COLUMNS: Mapping[str, Any] = {}
OPENING_TOKENS = 16
"""How many tokens at the end of a prompt are searched for the beginning of the thinking."""
MAX_CACHED_TEXT = 2048
"""Number of characters of the longest text whose tokens are kept.

Long observations seldom come again.
"""


@dataclass(eq=False)
class TurnFormat:
    """Renders observations. Without a chat template they are plain text."""

    section: DataSection
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: frozenset[int]
    placeholder_token_ids: frozenset[int] = frozenset()
    """Tokens that represent media in prompts; observations cannot have them."""
    _known: dict[str, list[int]] = field(default_factory=dict)

    def prompt(self, prompt: Prompt, request: TurnRequest) -> Prompt:
        """Return the prompt of a conversation.

        It is the row's prompt with the first observation, at the end of the last message if that is
        a text. A request that begins a separate conversation has the observation alone. Raises
        ValueError if it becomes longer than --prompt_max_len.
        """
        observation = request.observation
        if request.after == BEGINNING:
            token_ids = self._observation_tokens(request, prompt)
            text = self.tokenizer.decode(token_ids)
        elif not observation:
            return prompt
        elif isinstance(observation, str):
            value = _append_text(prompt.columns[INPUT], observation)
            text = prompt_text(self.section, self.tokenizer, prompt.columns, value)
            special_tokens = not self.section.apply_chat_template
            token_ids = self._expand_media(
                text_tokens(self.tokenizer, text, special_tokens=special_tokens)
            )
        else:
            token_ids = [*prompt.token_ids, *self.tokens(request, None, prompt.columns)]
            text = self.tokenizer.decode(token_ids)

        if len(token_ids) > self.section.prompt_max_len:
            raise ValueError(
                f"the prompt with the first observation has {len(token_ids)} tokens, more than"
                f" --prompt_max_len {self.section.prompt_max_len}"
            )
        return replace(prompt, text=text, token_ids=token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a turn without the end.

        Other special tokens stay, as they may mark tool calls.
        """
        ended = bool(token_ids) and token_ids[-1] in self.end_token_ids
        return self.tokenizer.decode(token_ids[:-1] if ended else token_ids)

    def read_calls(
        self, parse: Parse, token_ids: list[int], context_ids: Sequence[int]
    ) -> tuple[str, list[ToolCall]]:
        """Return the text of a turn without calls, and the calls."""
        # The parser must see where the thinking begins, also if the prompt has begun it.
        opened = self.opens_thinking(context_ids)
        content, calls = parse(opened + self.decode(token_ids))
        return content.removeprefix(opened), calls

    def opens_thinking(self, context_ids: Sequence[int], **options: bool) -> str:
        """Return the mark that begins thinking if the prompt of a turn ends with it.

        The tokenizer's decode() takes the `options`.
        """
        ending = self.tokenizer.decode(context_ids[-OPENING_TOKENS:], **options).rstrip()
        return next((begin for begin in THINKING if ending.endswith(begin)), "")

    def tokens(
        self, request: TurnRequest, last_token: int | None, row: Mapping[str, Any] = NO_COLUMNS
    ) -> list[int]:
        """Return the tokens of an observation after a turn that ends with `last_token`.

        `row` has the columns of the conversation's row. Raises ValueError if the chat template
        rejects it.
        """
        observation = "" if request.observation is None else request.observation
        if _are_token_ids(observation):
            return self._in_vocabulary(observation)

        messages = observation
        if isinstance(observation, str):
            messages = [{"role": "user", "content": observation}]
        if request.plain or not self.section.apply_chat_template:
            return self._tokenize("".join(each["content"] for each in messages))

        token_ids = self._tokenize(self._between(messages, request, row))
        # The model has sampled the end of its turn itself, so the template's must not follow it. One
        # that begins the next turn follows another end.
        begins_next = chat_template(self.section, self.tokenizer).closing.begins_next
        ends = {last_token} if begins_next else self.end_token_ids
        ended = last_token in self.end_token_ids and bool(ends.intersection(token_ids[:1]))

        return token_ids[1:] if ended else token_ids

    def _observation_tokens(self, request: TurnRequest, prompt: Prompt) -> list[int]:
        observation = request.observation or ""
        if isinstance(observation, str):
            return self._expand_media(text_tokens(self.tokenizer, observation))
        if _are_token_ids(observation):
            return self._in_vocabulary(observation)
        if not self.section.apply_chat_template:
            raise ValueError(
                "messages are rendered by the chat template: set --apply_chat_template"
            )
        return self._tokenize(self._render(observation, request, prompt.columns, tools=[]))

    def _between(
        self, messages: list[Message], request: TurnRequest, row: Mapping[str, Any]
    ) -> str:
        """Return the text from the end of a turn to the beginning of the next one.

        These messages stand between them.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        text = self._render([*before, *messages], request, row, tools=as_tools(row.get("tools")))
        _, marker, between = text.rpartition(TURN)
        if not marker:
            raise ValueError(
                "the chat template leaves out the turns of the assistant before the last message"
            )
        return between

    def _render(
        self,
        messages: list[Message],
        request: TurnRequest,
        row: Mapping[str, Any],
        *,
        tools: list[dict[str, Any]],
    ) -> str:
        """Render messages with a generation prompt.

        The row's tools and the request's are described.
        """
        messages = as_messages(messages) or []
        if any(isinstance(message["content"], list) for message in messages):
            raise ValueError("an observation is text: images, videos and sound cannot be observed")
        variables = as_object(row.get("chat_template_kwargs"), "the column 'chat_template_kwargs'")
        template = chat_template(self.section, self.tokenizer)
        tools = [*tools, *as_tools(plain(request.tools, "tools"), written=True)]
        return template.render(messages, answer_follows=True, tools=tools, variables=variables)

    def _in_vocabulary(self, token_ids: list[int]) -> list[int]:
        size = len(self.tokenizer)
        if outside := [token for token in token_ids if not 0 <= token < size]:
            raise ValueError(f"token {outside[0]} is not one of the {size} of the tokenizer")
        if self.placeholder_token_ids.intersection(token_ids):
            raise ValueError(
                "an observation is text: its tokens contain a placeholder of an image, a video or"
                " sound"
            )
        return list(token_ids)

    def _tokenize(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            token_ids = self._expand_media(
                self.tokenizer(text, add_special_tokens=False)["input_ids"]
            )
            if len(text) > MAX_CACHED_TEXT:
                return token_ids
            self._known[text] = token_ids
        return self._known[text]

    def _expand_media(self, token_ids: list[int]) -> list[int]:
        """Return the tokens with placeholders of media spelled in letters.

        This is for texts that mention `<image>`. Raises ValueError if the tokenizer cannot split
        them.
        """
        if not self.placeholder_token_ids.intersection(token_ids):
            return token_ids

        spelled: list[int] = []
        for token in token_ids:
            if token in self.placeholder_token_ids:
                text = self.tokenizer.convert_ids_to_tokens(token)
                spelled += self.tokenizer(
                    text, add_special_tokens=False, split_special_tokens=True
                )["input_ids"]
            else:
                spelled.append(token)

        return self._in_vocabulary(spelled)


def _are_token_ids(observation: str | list[Message] | list[int]) -> TypeGuard[list[int]]:
    return not isinstance(observation, str) and all(isinstance(each, int) for each in observation)


def _append_text(value: Any, observation: str) -> Any:
    """Return the input of a row with a text at the end of the last message."""
    if isinstance(value, str):
        return f"{value}{observation}"
    *others, last = value
    return [*others, last | {"content": f"{last['content']}{observation}"}]
