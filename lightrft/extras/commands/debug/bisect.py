"""Find the first step and phase where two runs differ, and what differs around them.

lightrft bisect runs/one runs/other

The exit code is 0 if all digests are equal, and 1 if some differ.
"""

import sys
from typing import TYPE_CHECKING

from lightrft.app.cli import command_parser

if TYPE_CHECKING:
    from lightrft.extras.recorder.differences import Difference


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("bisect", __doc__)
    arguments = parser.parse_args(argv)
    from lightrft.extras.recorder.differences import find_difference

    try:
        found = find_difference(arguments.one, arguments.other)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(text_of(found))
    sys.exit(found.step is not None)


def text_of(found: "Difference") -> str:
    """Return what the command prints."""
    from lightrft.extras.recorder.differences import MEANINGS

    if found.step is None:
        of = "of sequences in" if found.other_layout else "of"
        lines = [f"equal: all digests {of} the {found.steps} steps that both runs have"]
    elif found.step == 0:
        lines = ["before the first step: the runs begin with other weights"]
    else:
        update = f" of optimizer step {found.update}" if found.update else ""
        meaning = MEANINGS[found.phase]
        lines = [f"step {found.step}, {found.phase}{update}: the first difference is in {meaning}"]
    if found.step is not None and found.phase in ("gradient", "weights"):
        lines.append(f"  in {', '.join(found.modules)}")

    lines += [f"  {location}" for location in found.locations]
    if found.other_layout:
        lines.append(
            "plan, loss, gradient and weights are not compared: ranks have other parts of models"
            " and sequences"
        )
    if found.causes:
        lines.append("what else differs between the runs:")
        lines += [f"  {cause}" for cause in found.causes]
    elif found.step is not None:
        lines.append("nothing else is known to differ: configuration, versions, machine and data")
    return "\n".join(lines) + "\n"
