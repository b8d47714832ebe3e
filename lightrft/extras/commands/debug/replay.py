"""Repeat the step of a bundle in one process, without an engine or a GPU, and compare the digests.

lightrft replay step123.zip
lightrft replay step123.zip --stage advantage
lightrft replay step123.zip --sample 7 --explain

The exit code is 0 if all digests that can be compared are equal, and 1 otherwise.
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from lightrft.app.cli import command_parser, user_errors
from lightrft.app.run.logs import set_up_logging

if TYPE_CHECKING:
    from lightrft.extras.recorder.bundle import Bundle
    from lightrft.extras.recorder.replay import Replay


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("replay", __doc__).parse_args(argv)
    from lightrft.app.run.digests import OF_SEQUENCES
    from lightrft.app.run.prepare import quiet_libraries
    from lightrft.app.trainer import build
    from lightrft.extras.recorder.bundle import Bundle
    from lightrft.extras.recorder.replay import explanation, replay

    set_up_logging()
    logger.disable("lightrft")
    quiet_libraries()

    with (
        user_errors(ValueError, OSError),
        tempfile.TemporaryDirectory(prefix="lightrft-replay-") as folder,
    ):
        bundle = Bundle.unpack(arguments.bundle, Path(folder))
        chosen = range(len(bundle.samples))
        if arguments.sample is not None:
            if arguments.sample not in chosen:
                raise ValueError(f"--sample {arguments.sample}: there are {len(chosen)} samples")
            chosen = [arguments.sample]
        explained = list(chosen) if arguments.explain or arguments.sample is not None else []
        result = replay(bundle, build, arguments.stage, explained)

    lines = comparison(bundle, result)
    for number in explained:
        lines += explanation(result, number)
    sys.stdout.write("\n".join(lines) + "\n")
    ours = bundle.content["world_size"] == 1
    sys.exit(not all(same for phase, same in result.equal.items() if ours or phase in OF_SEQUENCES))


def comparison(bundle: "Bundle", result: "Replay") -> list[str]:
    """Return what the command prints about each phase."""
    from lightrft.app.run.digests import OF_SEQUENCES

    content = bundle.content
    ranks = content["world_size"]
    lines = [f"step {content['step']}: {len(bundle.samples)} samples"]
    if not result.rewards:
        lines.append("  rewards are the recorded ones: a model or a server has given them")
    for phase, same in result.equal.items():
        word = "equal" if same else "different"
        if not same and ranks > 1 and phase not in OF_SEQUENCES:
            word = f"not comparable: the run has divided it among {ranks} ranks"
        lines.append(f"  {phase:<10} {word}")

    if not result.equal.get("rewards", True):
        recorded = [sample.reward for sample in result.samples]
        pairs = enumerate(zip(recorded, result.rewards, strict=True))
        for number, (then, now) in pairs:
            if then != now:
                lines.append(f"  the reward of sample {number} is {now:.9g}, in the run {then:.9g}")
                break
    loss = content["metrics"].get("train/loss")
    if result.loss is not None and loss is not None:
        lines.append(f"  loss is {result.loss:.9g}, in the run {loss:.9g}")
    if content["device"] and not all(result.equal.values()):
        lines.append(f"  the run computed on {content['device']}, which rounds differently")
    return lines
