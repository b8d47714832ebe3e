"""Test a reward function before a model learns to exploit it.

lightrft test_rewards my_rewards.py:f data.jsonl
lightrft test_rewards code programs.jsonl --response_key solution

It is called with right and wrong answers to the rows, and with responses that a policy tries sooner
or later: nothing, the prompt, a quotation of it, several answers, odd characters. Exit code 1 means
that a fault was found.
"""

import sys

from rich.console import Console
from rich.markup import escape

from lightrft.app.cli import command_parser, user_errors
from lightrft.app.run.logs import set_up_logging
from lightrft.config.errors import DataError
from lightrft.config.sections import CommaSeparated, DataSection


def main(argv: list[str] | None = None) -> None:
    options = command_parser("test_rewards", __doc__).parse_args(argv)
    from lightrft.extras.tools.reward_tests import RewardTest, read_prompts

    set_up_logging()
    section = DataSection(
        prompt_data=CommaSeparated(options.data),
        input_key=options.input_key,
        label_key=options.label_key,
        apply_chat_template=True,  # rows may be chats
    )
    with user_errors(ValueError):
        prompts = read_prompts(section, options.rows)
        if not prompts:
            raise DataError(f"{options.data} has no rows")
        test = RewardTest(options.reward, prompts, options.response_key, slow=options.slow)
        findings = test.run()

    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        kind = "[red]fault[/red]" if finding.is_fault else "note "
        console.print(f"{kind}  {finding.test}: {escape(finding.evidence)}")
    console.print(
        f"{options.reward}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'} in"
        f" {len(prompts)} rows; {test.throughput:.0f} responses a second in one process"
    )
    sys.exit(int(any(finding.is_fault for finding in findings)))
