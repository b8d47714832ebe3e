"""Choose the teacher of a sample and the prompt that it sees, from columns of the data."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.sections import DataSection
from lightrft.core.experience import LocalSamples
from lightrft.core.samples import Prompt
from lightrft.data.prompts import prompt_text
from lightrft.data.rendering.forms import prompt_value
from lightrft.data.rendering.tokens import text_tokens


@dataclass
class TeacherColumns:
    """Sets the columns of an experience that Teachers reads.

    --teacher_key names a column with the label of a sample's teacher, --teacher_prompt_key one with
    the prompt that the teacher sees, a text or chat messages like the prompt itself.
    """

    section: DataSection
    tokenizer: Tokenizer
    labels: Sequence[str]
    """Names of the teachers, in order."""
    _: KW_ONLY
    longest: int
    """Most tokens of a prompt."""

    @property
    def requirements(self) -> list[Any]:
        """Return the JSON value that problem() depends on, for --data_cache."""
        keys = [self.section.teacher_key, self.section.teacher_prompt_key]
        return [*keys, list(self.labels), self.longest]

    def problem(self, prompt: Prompt) -> str | None:
        """Return why a row of the data cannot be used; None if it can."""
        for flag in ("teacher_key", "teacher_prompt_key"):
            column = getattr(self.section, flag)
            if column is not None and column not in prompt.columns:
                names = ", ".join(prompt.columns) or "none beside the prompt"
                return f"no column {column!r} (--{flag}); it has {names}"

        key = self.section.teacher_key
        if key is not None and prompt.columns[key] not in self.labels:
            return (
                f"{key!r} is {prompt.columns[key]!r:.100}, but --teacher_pretrain names"
                f" {', '.join(self.labels)}"
            )
        if self.section.teacher_prompt_key is None:
            return None

        try:
            num_tokens = len(self.prompt_ids(prompt))
        except ValueError as error:
            return str(error)
        if not num_tokens:
            return "the teacher's prompt is empty"
        if num_tokens > self.longest:
            return (
                f"the teacher's prompt has {num_tokens} tokens, but with --generate_max_len only"
                f" {self.longest} fit into a micro-batch"
            )
        return None

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the prompt that the teacher sees, rendered like the actor's."""
        name = self.section.teacher_prompt_key
        value = prompt_value(self.section, prompt.columns[name], name)
        text = prompt_text(self.section, self.tokenizer, prompt.columns, value)
        return text_tokens(
            self.tokenizer, text, special_tokens=not self.section.apply_chat_template
        )

    def __call__(self, local: LocalSamples) -> None:
        """Set `teachers`, and with prompts of their own `teacher_prompts` and `prompt_lengths`."""
        experience = local.experience
        samples = local.rows
        if self.section.teacher_key is not None:
            named = [each.prompt.columns[self.section.teacher_key] for each in samples]
            numbers = [self.labels.index(label) for label in named]
            experience.teachers = torch.tensor(numbers, dtype=torch.int64)
        if self.section.teacher_prompt_key is None:
            return

        ids = {sample.group: self.prompt_ids(sample.prompt) for sample in samples}
        # The column has one width on all ranks, because rows travel.
        width = max(local.data.gather(max(map(len, ids.values()), default=0)))
        prompts = torch.full((len(samples), width), -1, dtype=torch.int32)
        for row, sample in enumerate(samples):
            tokens = ids[sample.group]
            prompts[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

        experience.teacher_prompts = prompts
        lengths = [len(sample.prompt.token_ids) for sample in samples]
        experience.prompt_lengths = torch.tensor(lengths, dtype=torch.int64)
