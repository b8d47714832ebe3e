"""Build prompts from rows: template, chat template, tokens, and the limit on the length."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.errors import DataError
from lightrft.config.references import REASONING_GYM, data_problems, data_sources
from lightrft.config.sections import DataSection, media_columns
from lightrft.core.samples import Answer, Prompt
from lightrft.data import media_files
from lightrft.data.chats import Conversation
from lightrft.data.columns.values import label_value, plain_row
from lightrft.data.digests import cache_key
from lightrft.data.duplicates import Duplicates
from lightrft.data.prompt_set import LoadedSet, PromptSet
from lightrft.data.readers import BadRows, files_of, is_first_rank, read_rows
from lightrft.data.rendering.forms import SYSTEMS, Reading, column, scored
from lightrft.data.rendering.messages import SYSTEM_ROLES, Message, as_object, as_tools, is_blank
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import text_tokens
from lightrft.data.stored import stored_prompts, storing_problem
from lightrft.registry import OBJECTS

RowProblem = Callable[[Prompt], str | None]
"""Function that returns the reason why a prompt cannot be used; None if it can."""
Read = Callable[[DataSection, Mapping[str, Any]], Reading]
"""Function that returns what a row means to `make`, such as scored()."""
MediaTokenCounter = Callable[[Prompt], int]
"""Function that returns the number of additional tokens for a prompt's media.

It raises ValueError for bad ones.
"""
HERE = Path()
ROW_NUMBER = re.compile(r"(:| row )\d+$")
"""Place of a row in its file, at the end of a location."""
NO_MEDIA: Mapping[str, list[media_files.MediaFile]] = {}
INPUT = "prompt"
"""Column with the input of a row, as environments receive it."""

DATA_FIELDS = {
    "prompt_data": ("prompt_split", "max_samples"),
    "eval_data": ("eval_split", "max_eval_samples"),
    "pretrain_data": ("pretrain_split", None),
}
"""Field with the name of the data -> fields with the split and the maximum number of rows."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """Holds what the rows of a data set are read with."""

    section: DataSection
    tokenizer: Tokenizer
    measure: MediaTokenCounter | None = None
    folder: Path = HERE
    """Folder of the file, where the media of rows are."""


Make = Callable[[RowContext, dict[str, Any]], Prompt]
"""make_prompt(), or another function with its signature."""
Parts = Callable[[DataSection, dict[str, Any]], list[dict[str, Any]]]
"""Function that returns the rows that a row is read as, such as row_of_each_turn()."""


def load_prompts(
    section: DataSection,
    tokenizer: Tokenizer,
    *,
    source: str = "prompt_data",
    row_problem: RowProblem | None = None,
    measure: MediaTokenCounter | None = None,
    make: Make | None = None,
    read: Read | None = None,
    parts: Parts | None = None,
    distinguishing: str | None = None,
    requirements: Any = None,
    keep_input: bool = False,
    longest: int | None = None,
) -> PromptSet:
    """Load all usable prompts of the data given by the field `source`.

    They are in file order, and several data sets follow one another. Rows without a prompt are bad
    rows, and so are prompts longer than `prompt_max_len` tokens. `measure` returns the tokens that
    media add to the length; `make` is make_prompt() by default, `read` tells what a row means to
    it, for the log, and `parts` returns the rows that it is read as. With `data_cache` they are
    stored in a file. It is used again unless `requirements` changes, a JSON value that determines
    `row_problem` and `measure`. `distinguishing` is a column for PromptSet.examples. With
    `keep_input` the prompt of a row, a text or messages, is also a column, INPUT. With answers of
    more than `longest` tokens, the prompt's included, a row is a bad row.
    """
    if longest is not None:
        row_problem = partial(too_long, longest=longest)
        requirements = [longest, requirements]
    if section.data_cache and requirements is None and not (make is row_problem is measure is None):
        raise TypeError("load_prompts() needs `requirements` to recognise its file")

    _check_templates(section, tokenizer)
    if source == "eval_data":
        keys = {"input_key": section.eval_input_key, "label_key": section.eval_label_key}
        section = replace(section, **{name: key for name, key in keys.items() if key is not None})

    probabilities = _probabilities(section, source)
    names = [data_source.name for data_source in data_sources(getattr(section, source))]
    if source == "eval_data":
        _check_held_out(section, names)

    context = RowContext(section, tokenizer, measure)
    mode = "none" if source == "eval_data" else section.deduplicate
    # rows of another `make` are learned
    duplicates = Duplicates(mode, None if make is None else tokenizer.decode)
    read = scored if make is None else read
    description: list[str] = []
    shared = (read, parts, row_problem, duplicates, count(), keep_input, description)
    streams = [
        _Rows(context, source, name, make or make_prompt, *shared).usable() for name in names
    ]
    if section.data_cache:
        split, most = DATA_FIELDS[source]
        limit = most and getattr(section, most)
        others = [requirements, make.__qualname__ if make else None, mode, keep_input]
        key = cache_key(section, names, getattr(section, split), limit, tokenizer, others)
        sets, digests = stored_prompts(
            Path(section.data_cache).expanduser(), key, streams, distinguishing=distinguishing
        )
        examples = [each.examples for each in sets]
    else:
        sets = [list(stream) for stream in streams]
        digests = None
        examples = [None] * len(streams)

    sets = [LoadedSet(*facts) for facts in zip(names, sets, probabilities, examples, strict=True)]
    prompts = PromptSet(sets, digests, description)
    _check_loaded(section, source, tokenizer, prompts)
    if is_first_rank():
        for line in (*description, *(f"--{source}: {each}" for each in prompts.repetitions())):
            logger.info(line)

    return prompts


def _check_loaded(
    section: DataSection, source: str, tokenizer: Tokenizer, prompts: PromptSet
) -> None:
    """Raise DataError if a column of media is in no row. Warn of texts without a chat template."""
    is_formed = section.apply_chat_template or section.input_template is not None
    if tokenizer.chat_template and not is_formed and is_first_rank():
        if not any(token in prompts[0].text for token in tokenizer.all_special_tokens):
            logger.warning(
                f"--{source}: the tokenizer has a chat template, and prompts are texts without it:"
                " add --apply_chat_template, unless --pretrain is a base model"
            )

    for medium, key in media_columns(section).items():
        has_one = any(prompt.multi_modal.get(medium) for prompt in prompts)
        if source != "pretrain_data" and not has_one:
            name = getattr(section, source)
            raise DataError(f"--{medium}_key {key}: no row of --{source} {name} has one here")


def _probabilities(section: DataSection, source: str) -> list[float | None]:
    """Return the probability of each data set; None for each if none are given.

    Raise DataError for impossible ones.
    """
    text = getattr(section, source)
    others = section.prompt_data_probs if source == "prompt_data" else []
    if problems := data_problems(source, text, others):
        raise DataError("; ".join(problems))
    weights = [data_source.weight for data_source in data_sources(text)]
    weights = others if others and len(weights) > 1 else weights
    return [None if weight is None else weight / sum(filter(None, weights)) for weight in weights]


@dataclass
class _Rows:
    """Rows of one data set, and what is made of them."""

    context: RowContext
    source: str
    name: str
    make: Make
    read: Read | None
    parts: Parts | None
    row_problem: RowProblem | None
    duplicates: Duplicates
    numbers: Iterator[int]
    """Indices of prompts, over all data sets."""
    keep_input: bool
    description: list[str]
    """Lines that say how each data set was understood."""
    num_chats: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    known: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Columns with a value -> the form of such rows."""
    files: set[str] = field(default_factory=set)

    @property
    def section(self) -> DataSection:
        return self.context.section

    def usable(self) -> Iterator[Prompt]:
        """Yield the usable prompts. Raise DataError if there is none."""
        split, most = DATA_FIELDS[self.source]
        limit = most and getattr(self.section, most)
        bad = BadRows(skip=self.section.bad_rows == "skip", flag=f"--{self.source}")
        count = 0
        built = self._built(getattr(self.section, split), bad)
        for location, prompt, problem in media_files.media_checked(built, self.section.check_media):
            if problem:
                bad.add(location, problem)
            elif not self.duplicates.omits(prompt):
                # Indices count usable rows only, over all data sets.
                prompt.index = next(self.numbers)
                prompt.location = location
                count = count + 1
                yield prompt
                if count == limit:
                    break

        bad.report()
        where = f"--{self.source} {self.name}"
        if self.num_chats and self.section.input_template is not None and is_first_rank():
            logger.warning(
                f"{where}: --input_template is for text: {self.num_chats} rows of chat messages"
                " are as they were"
            )
        if not count:
            omitted = self.duplicates.count
            others = f" and {omitted} duplicates were omitted" if omitted else ""
            raise DataError(
                f"{where}: no usable row ({len(bad.reasons)} bad ones were skipped{others})"
            )
        self.duplicates.report(where, count)
        self.description.append(f"{where}: {self._understood(count)}")

    def _built(self, split: str, bad: BadRows) -> Iterator[tuple[str, Prompt]]:
        """Yield the prompts of rows that are not bad, with the locations of the rows."""
        path = Path(self.name).expanduser()
        context = replace(self.context, folder=path.parent if path.is_file() else path)
        for location, row in read_rows(self.name, split, bad):
            try:
                row = plain_row(row, leave=media_columns(self.section).values())
                parts = self.parts(self.section, row) if self.parts else [row]
                prompts = [self.make(context, part) for part in parts]
            except (ValueError, RecursionError) as error:
                bad.add(location, str(error))
                continue

            for part, prompt in zip(parts, prompts, strict=True):
                self._note(part, prompt, location)
                problem = self.row_problem(prompt) if self.row_problem else None
                if not problem and self.section.data_cache:
                    problem = storing_problem(prompt)
                if problem:
                    bad.add(location, problem)
                else:
                    yield location, prompt

    def _note(self, row: dict[str, Any], prompt: Prompt, location: str) -> None:
        """Note how a row is understood, and give its prompt the column INPUT if that is wanted."""
        # Rows with the same columns have the same form.
        columns = tuple(name for name, value in row.items() if value is not None)
        every = self.keep_input or self.section.input_template is not None
        if self.read and (columns not in self.known or every):
            reading = self.read(self.section, row)
            self.known[columns] = reading.form
            self.num_chats += isinstance(reading.prompt, list)
            if self.keep_input:
                prompt.columns.setdefault(INPUT, reading.prompt)
        self.forms[self.known.get(columns, "columns of a benchmark")] += 1
        self.files.add(ROW_NUMBER.sub("", location))

    def _understood(self, count: int) -> str:
        """Return the most common forms, the number of rows, and the files that they are from."""
        common = self.forms.most_common(5)
        forms = [f"{form} ({n:,} rows)" if len(self.forms) > 1 else form for form, n in common]
        others = sorted(
            Path(file).name for file in self.files - {self.name} if Path(file).is_file()
        )
        num_files = f" of {len(others)} files" if len(others) > 1 else ""
        of_files = f"{num_files} ({', '.join(others[:5])})" if others else ""
        return f"{', '.join(forms)}; {count:,} rows{of_files}"


def _check_held_out(section: DataSection, names: list[str]) -> None:
    """Raise DataError if training and held-out data have rows of reasoning-gym in common.

    Warn of data that are in both.
    """
    training = [each.name for each in data_sources(section.prompt_data) if each.name]
    learned = _locations(training, section.prompt_split)
    held_out = _locations(names, section.eval_split)
    for location in sorted(learned & held_out) if is_first_rank() else ():
        logger.warning(
            f"--eval_data: {location} is in --prompt_data too: an evaluation on rows that are"
            " learned does not show what the model does on others"
        )

    if any(name.startswith(REASONING_GYM) for name in names):
        from lightrft.data.reasoning_gym.tasks import check_held_out

        check_held_out(training, names, split=section.prompt_split, eval_split=section.eval_split)


def _locations(names: list[str], split: str) -> set[str]:
    """Return the files of a split, and names of data that are not files."""
    locations = set()
    for name in names:
        with suppress(DataError):  # who reads the data says it
            files = files_of(name, split, "")
            # Rows of a call in Python, and a Dataset that is stored, are of no split.
            folder = Path(name).expanduser()
            whole = name.startswith(OBJECTS.__name__) or (folder / "state.json").exists()
            other = name if whole else f"{name}[{split}]"
            locations.update({str(file.resolve()) for file in files} or {other})
    return locations


def _check_templates(section: DataSection, tokenizer: Tokenizer) -> None:
    """Raise DataError for problems with templates that would affect every row."""
    if section.input_template is not None and "{}" not in section.input_template:
        raise DataError(f"--input_template {section.input_template!r} has no {{}} for the prompt")
    if section.apply_chat_template and not tokenizer.chat_template:
        raise DataError(
            "--apply_chat_template: the tokenizer of --pretrain has no chat template: copy the"
            " chat_template.jinja of another model into its folder, or use --input_template for"
            " prompts that are text"
        )


def too_long(prompt: Prompt, longest: int) -> str | None:
    """Return why a row with more than `longest` tokens cannot be used; None if it can."""
    length = size_of_row(prompt)
    if length <= longest:
        return None
    answers = sum(isinstance(each, Answer) for each in prompt.columns.values())
    what = "both answers with the prompt" if answers == 2 else "prompt and answer"
    return f"{what} have {length} tokens, more than {longest} (--max_tokens_per_microbatch)"


def size_of_row(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt with each of the answers to it."""
    answers = [answer for answer in prompt.columns.values() if isinstance(answer, Answer)]
    return sum(prompt.num_tokens + len(answer.token_ids) for answer in answers)


def make_prompt(context: RowContext, row: dict[str, Any]) -> Prompt:
    """Build a prompt from the columns of a row. Raise ValueError for a bad row."""
    reading = scored(context.section, row)
    columns = reward_columns(context.section, row, reading)
    return built_prompt(context, row, reading.prompt, columns)


def built_prompt(
    context: RowContext, row: Mapping[str, Any], value: Any, columns: dict[str, Any]
) -> Prompt:
    """Build a prompt from its text or messages, and give it `columns`.

    Media and what a chat template reads are in the row. Raise ValueError for a bad one.
    """
    section = context.section
    tokenizer = context.tokenizer
    media = row_media(context, row, value if isinstance(value, list) else ())
    text = prompt_text(section, tokenizer, row, value, media=media)

    # a chat template writes its own special tokens
    token_ids = text_tokens(tokenizer, text, special_tokens=not section.apply_chat_template)
    if not token_ids:
        raise ValueError("the prompt is empty")

    return with_media_tokens(Prompt(0, text, token_ids, columns, media), context)


def row_media(
    context: RowContext, row: Mapping[str, Any], messages: Sequence[Message]
) -> dict[str, list[media_files.MediaFile]]:
    """Return the media of a row.

    They come from the row's columns, or else from the parts of the messages. Raise ValueError for
    values that are none, and for media that the text names and no flag reads.
    """
    section = context.section
    for medium in media_files.PART_TYPES.keys() - media_columns(section):
        kind = media_files.PART_TYPES[medium]
        name = next((name for name in (medium, kind) if row.get(name)), None)
        if name and f"<{kind}>" in str(row):
            raise ValueError(
                f"<{kind}> stands for the column {name!r}, which is not read: add --{medium}_key {name}"
            )
    root = Path(section.media_root).expanduser() if section.media_root else None
    location = media_files.MediaLocation(
        context.folder, root, round(section.media_max_mb * 1e6), section.media_urls
    )
    of_item = {
        media_files.IMAGES: location.image,
        media_files.AUDIOS: partial(location.audio, rate=section.audio_sampling_rate),
        media_files.VIDEOS: partial(
            location.video, fps=section.video_fps, most=section.video_max_frames
        ),
    }
    items = {
        medium: media_files.items_of(medium, row.get(column))
        or media_files.items_in(medium, messages)
        for medium, column in media_columns(section).items()
    }
    media = {medium: [of_item[medium](item) for item in found] for medium, found in items.items()}

    return {medium: items for medium, items in media.items() if items}


def with_media_tokens(prompt: Prompt, context: RowContext) -> Prompt:
    """Set the number of tokens of the prompt's media, and return the prompt.

    Raise ValueError if it is too long.
    """
    prompt.media_tokens = context.measure(prompt) if context.measure else 0
    limit = context.section.prompt_max_len
    if prompt.num_tokens > limit:
        raise ValueError(
            f"the prompt has {prompt.num_tokens} tokens, more than --prompt_max_len {limit}"
        )
    return prompt


def reward_columns(section: DataSection, row: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the columns that rewards receive.

    Raise ValueError for a configured column that the row does not have.
    """
    others = {*reading.asked, *media_columns(section).values()}
    columns = {name: value for name, value in row.items() if name not in others}
    if reading.names:
        columns["label"] = label_value(reading.label, reading.names[0])

    if (name := section.reference_key) is not None:
        columns["reference"] = column(row, name, "reference_key", may_be_empty=True)

    return columns


def prompt_text(
    section: DataSection,
    tokenizer: Tokenizer,
    row: Mapping[str, Any],
    value: Any,
    *,
    media: Mapping[str, list[media_files.MediaFile]] = NO_MEDIA,
) -> str:
    """Return the text of a prompt that is a text or chat messages.

    Raise ValueError for messages that cannot be rendered.
    """
    if not section.apply_chat_template:
        return with_template(section, value)
    template = chat_template(section, tokenizer)
    conversation = complete_chat(section, row, chat_of(section, value), media)
    return conversation.for_template(template).render(template, answer_follows=True)


def with_template(section: DataSection, text: str) -> str:
    """Return a text in --input_template."""
    return text if section.input_template is None else section.input_template.replace("{}", text, 1)


def chat_of(section: DataSection, value: str | list[Message]) -> list[Message]:
    """Return the messages of a prompt. A text becomes a message of the user, in --input_template."""
    if not isinstance(value, str):
        return value
    return [{"role": "user", "content": with_template(section, value)}]


def complete_chat(
    section: DataSection,
    row: Mapping[str, Any],
    messages: list[Message],
    media: Mapping[str, list[media_files.MediaFile]],
) -> Conversation:
    """Return the conversation of a row, ready to render.

    That is the messages, the system prompt if there is none, media where they belong, and tools. A
    row may have columns for the chat template: those of SYSTEMS, `tools`, and
    `chat_template_kwargs`, which replace the run's. Raise ValueError if one of them cannot be read,
    and for an empty message of the user.
    """
    texts = [row[name] for name in SYSTEMS if row.get(name)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the system message is no text, but {texts[0]!r:.80}; rename its column")
    system = next(filter(str.strip, texts), section.system_prompt)
    if system is not None and not any(message["role"] in SYSTEM_ROLES for message in messages):
        messages = [{"role": "system", "content": system}, *messages]

    # A part that nothing reads would vanish from the prompt.
    counts = {medium: len(media.get(medium, ())) for medium in media_columns(section)}
    has_media = any(counts.values())
    for number, message in enumerate(messages, 1):
        content = message["content"]
        if message["role"] == "user" and not has_media and is_blank(str(content or "")):
            raise ValueError(f"message {number} of {len(messages)}, of role 'user', is empty")
        parts = content if isinstance(content, list) else ()
        known = {"text", *(media_files.PART_TYPES[medium] for medium in counts)}
        kinds = {str(part["type"]) for part in parts} - known
        if kinds:
            kind = kinds.pop()
            advice = "parts are texts, media, or Anthropic's thinking, tool_use and tool_result"
            if kind in media_files.PART_TYPES.values():
                advice = (
                    "media are read with --images_key, --videos_key or --audios_key, from the"
                    " column of this name or from the parts themselves"
                )
            where = f"message {number} of {len(messages)}"
            raise ValueError(f"{where} has a part of type {kind!r}: {advice}")
    if counts:
        messages = media_files.with_parts(messages, counts)
    variables = as_object(row.get("chat_template_kwargs"), "the column 'chat_template_kwargs'")
    tools = as_tools(row.get("tools")) or as_tools(variables.pop("tools", ()), written=True)
    return Conversation(messages, tools, variables)
