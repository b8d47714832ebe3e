"""Load the data of a run: prompts, answers, and the number of steps that they allow."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from loguru import logger
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.algorithms.rollout.teacher_columns import TeacherColumns
from lightrft.algorithms.stages.compare import columns_of_data
from lightrft.app.run.run import Run
from lightrft.config.errors import ConfigError
from lightrft.config.references import teacher_terms
from lightrft.config.sections import Config, has_episodes, media_columns
from lightrft.core.groups import number_problem
from lightrft.core.samples import Answer, Prompt
from lightrft.data.conversations import load_examples
from lightrft.data.loader import check_batch
from lightrft.data.media_files import AUDIOS, IMAGES, VIDEOS
from lightrft.data.preferences import load_answers, load_pairs
from lightrft.data.prompt_set import PromptSet
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import is_first_rank
from lightrft.data.rendering.template import chat_template, template_variables, turn_end_ids
from lightrft.data.rendering.tokens import marked_texts
from lightrft.data.step_labels import load_steps
from lightrft.models.load import load_tokenizer
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.strategy import StrategyBase

ENOUGH_STEPS = 50
"""Steps for which default batches become smaller."""
FEW_STEPS = 20
SMALLEST_BATCH = 4
"""Rows of a step that no default goes below."""


def load_run(
    config: Config, strategy: StrategyBase, *, engine: bool = False, trained: bool = True
) -> Run:
    """Load the tokenizer and the processor of the model.

    A model that is `trained` is known to learn from the media. For `engine`, see load_expander().
    """
    tokenizer = load_tokenizer(config.model)
    check_tools(config, tokenizer)
    expand = load_expander(config, tokenizer, engine=engine)
    if trained and expand is not None:
        expand.check_family()
    return Run(config, strategy, tokenizer, expand)


def load_expander(config: Config, tokenizer: Tokenizer, *, engine: bool) -> Expander | None:
    """Return the expander of prompts with media; None if all prompts are text.

    If prompts go to an `engine`, they may have no more media than it takes. The tokenizer gets the
    chat template of the processor, because only that one contains the placeholders.
    """
    media = media_columns(config.data)
    if not media:
        return None

    expand = Expander(config.model, media, most=_most(config) if engine else None)
    try:
        tokenizer.chat_template = expand.chat_template or tokenizer.chat_template
    except ValueError as error:
        raise ConfigError(
            f"--{next(iter(media))}_key: {error}; omit the flag to train the model on text"
        ) from error

    return expand


def load_rewarded(run: Run, rewards: RewardRunner, *, source: str = "prompt_data") -> PromptSet:
    """Load prompts with the columns that the rewards need.

    In training they also have what the estimator and the teachers need.
    """
    config = run.config
    problems = [rewards.row_problem]
    requirements = [rewards.requirements, limits_of_media(config)]
    if source == "prompt_data":
        numbers = columns_of_data(config.algorithm)
        problems += [partial(number_problem, name) for name in numbers]
        requirements.append(numbers)
        if teachers := teacher_columns(config, run.tokenizer):
            problems.append(teachers.problem)
            requirements.append(teachers.requirements)

    def row_problem(prompt: Prompt) -> str | None:
        return next(filter(None, (problem(prompt) for problem in problems)), None)

    return load_prompts(
        config.data,
        run.tokenizer,
        source=source,
        row_problem=row_problem,
        measure=run.expand and run.expand.measure,
        distinguishing=config.reward.reward_key,
        requirements=requirements,
        keep_input=has_episodes(config.environment)
        or rewards.function.reads_messages
        or source == "eval_data",
    )


def teacher_columns(config: Config, tokenizer: Tokenizer) -> TeacherColumns | None:
    """Return what reads the columns about teachers; None if there are none."""
    if config.data.teacher_key is None and config.data.teacher_prompt_key is None:
        return None
    labels = [label for label, _ in teacher_terms(config.model.teacher_pretrain)]
    longest = config.train.most_logprob_tokens - config.rollout.generate_max_len
    return TeacherColumns(config.data, tokenizer, labels, longest=longest)


def limits_of_media(config: Config) -> Any:
    """Return what a prompt's number of media tokens depends on; None if all prompts are text."""
    return [config.model.pretrain, _most(config)] if media_columns(config.data) else None


def _most(config: Config) -> dict[str, int]:
    engine = config.engine
    return {
        IMAGES: engine.limit_mm_image_per_prompt,
        VIDEOS: engine.limit_mm_video_per_prompt,
        AUDIOS: engine.limit_mm_audio_per_prompt,
    }


def load_supervised(run: Run, *, source: str) -> PromptSet:
    return load_examples(
        run.config.data,
        run.tokenizer,
        source=source,
        longest=run.config.train.max_tokens_per_microbatch,
        measure=run.expand and run.expand.measure,
        requirements=limits_of_media(run.config),
    )


LOADERS: dict[str, Callable[..., PromptSet]] = {
    "train_rm": load_pairs,
    "train_dpo": load_pairs,
    "train_kto": load_answers,
    "train_prm": load_steps,
}
"""Command -> function that loads rows with judged answers."""
SHOWN_ROWS = 1000


def shown_data(
    config: Config, command: str, *, source: str = "prompt_data"
) -> tuple[Sequence[str], list[tuple[str, bool]]]:
    """Return how the first rows of a data set are understood, and one as the model reads it.

    The former is a line for each data set. The latter are texts, with True for those that are
    learned. Raise DataError for a row that cannot be used.
    """
    most = min(config.data.max_samples or SHOWN_ROWS, SHOWN_ROWS)
    section = replace(config.data, max_samples=most, max_eval_samples=most, data_cache="")
    tokenizer = load_tokenizer(config.model)
    expand = load_expander(config, tokenizer, engine=False)
    options = {"source": source, "measure": expand and expand.measure}
    longest = config.train.max_tokens_per_microbatch

    if load := LOADERS.get(command):
        preference = replace(config.preference, head_key=None)  # the model says which heads it has
        prompts = load(section, preference, tokenizer, longest=longest, **options)
    elif command == "train_sft" or source == "pretrain_data":
        prompts = load_examples(section, tokenizer, longest=longest, **options)
    else:
        prompts = load_prompts(section, tokenizer, **options)

    answers = [each for each in prompts[0].columns.values() if isinstance(each, Answer)]
    return prompts.description, marked_texts(prompts[0].text, answers, tokenizer)


def steps_of_epochs(config: Config, num_rows: int, *, generates: bool = False) -> int:
    """Return how many whole batches all epochs have together, at most --max_steps.

    If the run `generates`, a row is a prompt, and otherwise it is a sample. A batch size that nobody
    set is halved while the data would give too few steps. Rows that no step learns from, and very
    short runs, are warnings.
    """
    train = config.train
    batch_size = _fitting_batch(config, num_rows, generates)
    check_batch(num_rows, batch_size)
    rows = num_rows * train.num_episodes
    steps = rows // batch_size
    notices = []

    # In other tools the number of steps replaces the number of epochs.
    if train.max_steps is not None and steps < train.max_steps:
        notices.append(
            f"--max_steps {train.max_steps} is not reached: --num_episodes {train.num_episodes} of"
            f" {num_rows} rows ends after {steps} steps; raise --num_episodes for more"
        )
    elif train.max_steps is None and steps < FEW_STEPS:
        notices.append(
            f"the run has {steps} steps, in which a model learns little: --num_episodes"
            f" {train.num_episodes} of {num_rows} rows, {batch_size} in a step; raise the first or"
            " lower the last"
        )
    if (train.max_steps or steps) >= steps and rows % batch_size:
        notices.append(
            f"{rows % batch_size} of {rows} rows are left over at the end: they do not fill a step"
            f" of {batch_size}"
        )

    if is_first_rank():
        for notice in notices:
            logger.warning(notice)

    return min(steps, train.max_steps or steps)


def _fitting_batch(config: Config, num_rows: int, generates: bool) -> int:
    """Return the rows of a step: what the user set, or a default that suits the data."""
    train = config.train
    section = config.rollout if generates else train
    name = "rollout_batch_size" if generates else "train_batch_size"
    default = size = getattr(section, name)
    if name in section.written:
        return size

    # The samples of a step stay a multiple of the samples of an update that the user set.
    samples = config.rollout.n_samples_per_prompt if generates else 1
    update = train.train_batch_size if "train_batch_size" in train.written else samples
    world = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = min(ENOUGH_STEPS, train.max_steps or ENOUGH_STEPS)
    rows = num_rows * train.num_episodes
    while size * samples % (2 * update) == 0:
        # A whole batch comes first, and steps enough after it. KTO compares two rows at least.
        least = 2 if size > num_rows else SMALLEST_BATCH
        if size // 2 < max(least, world) or (rows // size >= wanted and size <= num_rows):
            break
        size //= 2
    if size == default:
        return size

    section.put(name, size)
    if "train_batch_size" not in train.written:
        train.put("train_batch_size", size * samples)
    if is_first_rank():
        logger.info(
            f"--{name} is {size} instead of {default}, so that {num_rows} rows give"
            f" {rows // size} steps; set it for another number"
        )
    return size


def with_token_ids(config: Config, tokenizer: Tokenizer) -> Config:
    """Add the tokens that only the tokenizer knows: ends of turns, and --bad_words.

    Responses also stop where the tokenizer and the chat template end a turn. Raises ConfigError for
    a bad word that is not one token.
    """
    rollout = config.rollout
    ends = turn_end_ids(config.data, tokenizer).union(rollout.stop_token_ids)
    banned = set(rollout.banned_token_ids)
    for word in rollout.bad_words:
        token_ids = tokenizer.encode(word, add_special_tokens=False)
        if len(token_ids) != 1:
            raise ConfigError(
                f"--bad_words {word!r} is {len(token_ids)} tokens of --pretrain"
                f" {config.model.pretrain}: whether the last one is excluded would depend on the"
                " tokens before it, and log-probs of engine and trainer would differ; name words"
                " of one token, or lower the reward of responses that contain it"
            )
        after_space = tokenizer.encode(f" {word}", add_special_tokens=False)
        banned.update(token_ids, after_space if len(after_space) == 1 else [])

    tokens = {"stop_token_ids": sorted(ends), "banned_token_ids": sorted(banned)}
    return replace(config, rollout=replace(rollout, **tokens))


def check_tools(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the chat template does not describe the run's tools to the model, or if
    there is none for the chats of an agent.
    """
    template = tokenizer.chat_template
    if config.environment.agent and not template:
        raise ConfigError(
            "--agent: the tokenizer of --pretrain has no chat template for the agent's messages: copy"
            " the chat_template.jinja of another model into its folder"
        )

    tools = template_variables(config.data).get("tools") or []
    if tools and template and not chat_template(config.data, tokenizer).describes(tools):
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise ConfigError(
            f"--tools: the chat template of --pretrain {config.model.pretrain} does not describe"
            f" tools, so no prompt would name {names}; use a model whose chat template does"
        )
