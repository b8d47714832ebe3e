"""Why: --engine_type takes an adapter of the user, which generates in a run like any other."""

import json
from pathlib import Path

import pytest

from lightrft.app.cli import train_ppo
from runs import NOT_REPEATABLE, PPO, prepare

USERS_ENGINE = """
from pathlib import Path

from lightrft.engine.hf import HFEngine


class Counting(HFEngine):
    '''The hf engine, which writes down how many prompts it begins.'''

    def _add(self, key, request):
        with open(Path(__file__).with_name("begun.txt"), "a") as file:
            file.write(f"{len(request.token_ids)}\\n")
        super()._add(key, request)


def function(setup):
    pass
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "mine.py").write_text(USERS_ENGINE)
    return folder, [flag for flag in [*PPO, *prepare(folder)] if "--engine_type" not in flag]


def train(inputs: tuple[Path, list[str]], engine: str, run: str) -> int:
    folder, flags = inputs
    options = [f"--engine_type={engine}", "--max_steps=2", f"--save_path={folder}/{run}"]
    with pytest.raises(SystemExit) as ended:
        train_ppo.main([*flags, *options])
    return ended.value.code


@pytest.mark.slow
def test_an_engine_of_the_user_has_the_numbers_of_the_one_that_it_extends(inputs):
    folder, _ = inputs
    assert train(inputs, "hf", "hf") == train(inputs, f"{folder}/mine.py:Counting", "own") == 0
    assert len((folder / "begun.txt").read_text().split()) == 2 * 8
    first, users = (
        [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("hf", "own")
    )
    repeatable = [name for name in first[-1] if not name.startswith(NOT_REPEATABLE)]
    assert [row[name] for row in users for name in repeatable] == [
        row[name] for row in first for name in repeatable
    ]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("{folder}/mine.py:function", "is not a subclass of Engine"),
        ("{folder}/mine.py:absent", "has no object 'absent'"),
        ("{folder}/no.py:Engine", "no.py:Engine: no file"),
        (
            "vlm",
            "--engine_type 'vlm': unknown; did you mean vllm? (choices: auto, vllm, sglang, hf",
        ),
    ],
)
def test_what_is_no_engine_is_refused(inputs, capfd, engine, said):
    folder, _ = inputs
    assert train(inputs, engine.format(folder=folder), "refused") == 2
    assert said in capfd.readouterr().err
