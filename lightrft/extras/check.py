"""Check everything that a run needs before it starts: files, packages, logins, data, the chat
template, rewards, and the plan.

    lightrft check configs/grpo_gsm8k_qwen2.5_7b.yaml
    lightrft check --command train_sft --pretrain some/model --prompt_data d.jsonl --ranks 8

The command has all other flags. It says how the rows are understood, shows one of them as the model
reads it, with what is learned in colour (between ⟦ and ⟧ in a file), and calls the rewards with a
right and a wrong answer. Data of a hub are not read. The exit code is 2 if something is wrong, else 0.
"""

import sys
from collections.abc import Callable

from lightrft.app.cli import command_parser, read_arguments, read_command_line
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.references import JUDGE, SERVER, reward_terms
from lightrft.config.sections import Config, fields_read

TRIED_ROWS = 8


def main(argv: list[str] | None = None) -> None:
    usage = "lightrft check [COMMAND] [CONFIG.yaml] [flags]"
    parser = command_parser("check", __doc__, usage=usage, allow_abbrev=False)
    options, flags = read_arguments(parser, argv)
    try:
        config = read_command_line(flags, options.command)
    except ConfigError as error:
        sys.exit(_concluded([str(error)]))
    sys.exit(_concluded(problems_of_run(config, options.command, options.ranks, options.device)))


def problems_of_run(config: Config, command: str, ranks: int, device: str) -> list[str]:
    """Print what the run reads and how it is planned; return what is wrong with it."""
    from lightrft.extras.commands.plan import show_data, show_plan

    problems: list[str] = []

    def attempt(check: Callable[..., int | None], *arguments: object, **options: object) -> None:
        try:
            if check(*arguments, **options):
                problems.append("the plan above says why")
        except (ValueError, OSError) as error:
            problems.append(str(error))

    attempt(show_plan, config, command, ranks, device, ranks_per_node=ranks)
    if problems:  # what follows reads the same files
        return problems

    for source in ("prompt_data", "pretrain_data", "eval_data"):
        if source in fields_read(command) and getattr(config.data, source):
            sys.stdout.write(f"\n--{source}\n")
            attempt(show_data, config, command, source=source)
    for term in reward_terms(config.reward.reward) if command == "train_ppo" else []:
        if not term.name.startswith(SERVER) and term.name not in (JUDGE, "none"):
            attempt(try_reward, config, term.name)

    return problems


def try_reward(config: Config, name: str) -> None:
    """Call a reward with a right and a wrong answer to some rows, and print what the first gets.

    Raise ConfigError for a function that fails.
    """
    from lightrft.extras.tools.reward_tests import RewardTest, read_prompts

    test = RewardTest(name, read_prompts(config.data, TRIED_ROWS))
    row = test.rows[0]
    texts = [text for text in (row.right, row.wrong) if text is not None] or ["7"]
    scored = zip(texts, test.scores(row.prompt, texts), strict=True)
    found = ", ".join(f"{score:g} for {text!r}" for text, score in scored)
    sys.stdout.write(f"\n--reward {name} gives {found}; more: lightrft test_rewards\n")


def _concluded(problems: list[str]) -> int:
    """Print what is wrong, and return the exit code."""
    lines = ["\nthis run cannot start:", *(f"  - {each}" for each in problems)]
    sys.stdout.write("\n".join(lines if problems else ["\nall is well: the run can start"]) + "\n")
    return USER_ERROR if problems else 0
