"""Why: figures of runs that nobody has made must be the planner's, for the printed commands."""

import re

import pytest

from scripts.laptop import plans

PAGE = plans.PAGE.read_text()
TRAININGS = list(plans.trainings(PAGE))
ROWS = re.search(r"<!-- plans -->\n(?:.*\n){2}((?:\|.*\n)*)<!-- end of plans -->", PAGE)[
    1
].splitlines()


def test_every_command_has_a_plan_that_fits():
    assert len(TRAININGS) == len(ROWS) == 12
    for training, row in zip(TRAININGS, ROWS, strict=True):
        _, config, model, devices, *_, fits, _ = (cell.strip(" `") for cell in row.split("|"))
        assert training.config_file.endswith(config) and any(
            flag.endswith(model) for flag in training.flags
        )
        assert devices.startswith(f"{training.ranks} x ") and fits == "yes"


@pytest.mark.slow
def test_the_plan_of_a_command_is_that_of_the_page():
    """GRPO on eight ranks stands for all twelve: each plan takes half a minute."""
    assert plans.row(TRAININGS[9]) == ROWS[9]


def test_commands_of_a_page_are_read_with_their_variables():
    page = """
```bash
flags="--bf16 --lora_rank 4"
torchrun --nproc-per-node 8 -m lightrft train_dpo $flags \\
    --seed 1
ls
```
```bash
lightrft train_ppo --config a.yaml --chat_template_kwargs '{"a": 1}'
```
"""
    assert list(plans.trainings(page)) == [
        plans.Training("train_dpo", 8, ("--bf16", "--lora_rank", "4", "--seed", "1")),
        plans.Training(
            "train_ppo", 1, ("--config", "a.yaml", "--chat_template_kwargs", '{"a": 1}')
        ),
    ]
