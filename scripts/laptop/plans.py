"""Plan the commands of docs/from_laptop_to_gpus.md, and write the table of that page.

This needs neither their models nor a GPU.

    python scripts/laptop/plans.py

The page is the only place of the commands. One without torchrun is planned for an L4 of 24 GB, one
with it for H100s.
"""

import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightrft.config.command_line import parse  # noqa: E402  after its folder
from lightrft.config.resolve import resolve  # noqa: E402
from lightrft.config.sections import Config  # noqa: E402
from lightrft.extras.tools.planning import RunPlan, plan_of  # noqa: E402
from scripts.pages import between_marks  # noqa: E402

PAGE = ROOT / "docs/from_laptop_to_gpus.md"
PHASES = ("train", "log-probs", "weight sync", "generate")


@dataclass(frozen=True, slots=True)
class Training:
    """A command of the page that trains."""

    command: str
    """Such as `train_ppo`."""
    ranks: int
    flags: tuple[str, ...]

    @property
    def device(self) -> str:
        return "l4" if self.ranks == 1 else "h100"

    @property
    def config_file(self) -> str:
        return self.flags[self.flags.index("--config") + 1]

    def config(self) -> Config:
        """Return the configuration of the flags. Raise ConfigError if they are impossible."""
        config = parse(list(self.flags), self.command)
        resolve(config, self.command, world_size=self.ranks)
        return config

    def plan(self) -> RunPlan:
        """Return the plan. Raise ConfigError if the shape of the model is not known."""
        return plan_of(self.config(), self.command, self.ranks, self.device, ranks_per_node=8)


def trainings(page: str) -> Iterator[Training]:
    """Yield the commands of a page's bash blocks that train.

    A block may set variables for the commands in it.
    """
    for block in re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        variables: dict[str, str] = {}
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if given := re.fullmatch(r'([a-z]+)="(.*)"', line):
                variables[given[1]] = given[2]
                continue

            words = shlex.split(Template(line).safe_substitute(variables))
            program = next((word for word in words if re.search(r"(^|\.)train_\w+$", word)), None)
            if program is None:
                continue
            ranks = (
                int(words[words.index("--nproc-per-node") + 1])
                if "--nproc-per-node" in words
                else 1
            )
            yield Training(
                program.rpartition(".")[2], ranks, tuple(words[words.index(program) + 1 :])
            )


def table(page: str) -> str:
    """Return the table of the plans of a page's commands.

    It has GB of a rank in each phase, and seconds of a step.
    """
    lines = [
        (
            "| Config | Model | GPUs | Trained | Train | Log-probs | Weight sync | Generate | A"
            " step | Fits |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(training) for training in trainings(page)),
    ]
    return "\n".join(lines) + "\n"


def row(training: Training) -> str:
    """Return the row of a command in the table."""
    config = training.config()
    plan = training.plan()
    cells = [
        f"`{Path(training.config_file).name}`",
        config.model.pretrain.rpartition("/")[2],
        f"{training.ranks} x {training.device.upper()}",
        f"LoRA {config.model.lora_rank}" if config.model.lora_rank else "all",
        *(
            f"{sum(plan.phases[phase].values()) / 1e9:.1f}" if phase in plan.phases else ""
            for phase in PHASES
        ),
        f"{sum(plan.seconds.values()):.1f} s" if plan.seconds else "",
        "yes" if plan.fits else "no",
    ]

    return f"| {' | '.join(cells)} |"


def main() -> None:
    warnings.simplefilter("ignore")  # torch's about views, in traces whose results nobody uses
    page = PAGE.read_text()
    PAGE.write_text(between_marks(page, "plans", table(page)))


if __name__ == "__main__":
    main()
