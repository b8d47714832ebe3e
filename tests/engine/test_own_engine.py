"""Why: --engine_type takes an adapter of the user, which generates in a run like any other, and the
package has the contract that it must keep.
"""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from lightrft.app.cli import MAINS
from lightrft.engine.testing import ENGINE_CASES, STREAM_ONLY_CASES, main, outcome, run_contract
from ranks import run_ranks
from runs import NOT_REPEATABLE, PPO, prepare
from tiny import tiny_model

ENGINES = Path(__file__).with_name("user_engines.py")
NAMES = [case.__name__ for case in ENGINE_CASES + STREAM_ONLY_CASES]
OF_WEIGHTS = (
    "the_end_token_ends_a_response",
    "new_weights_are_used",
    "no_prefix_of_the_old_weights_survives",
    "any_order_of_the_stream_will_do",
    "a_step_sleeps_streams_and_wakes",
    "a_tied_model_comes_by_stream",
)
"""Cases that load other weights than those of the folder."""
OF_SEEDS = (
    "the_seed_decides",
    "the_callers_generators_are_left_alone",
    "requests_are_admitted_while_others_decode",
)
BROKEN = {
    "ForgetsTheTemperature": (
        ("logprobs_are_of_the_sampling_distribution",),
        "log-probs at temperature 0.7 differ by ",
    ),
    "KeepsTheTrainersTensors": (("the_engine_has_its_own_copy",), "greedy responses differ"),
    "IgnoresTheSeed": (OF_SEEDS, "samples of one seed differ"),
    "KeepsTheOldWeights": (OF_WEIGHTS, "EngineError: weight sync, rank 0 of the engine: "),
}
"""Engine in user_engines.py -> cases that fail, and the reason of the first one."""

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
        MAINS["train_ppo"]([*flags, *options])
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


def said(*words: str) -> tuple[int, list[str]]:
    """Return the exit code of the command, and what it says about cases."""
    with redirect_stdout(StringIO()) as output:
        code = main(list(words))
    lines = output.getvalue().splitlines()
    return code, [line for line in lines if line.split(":")[0] in NAMES]


@pytest.mark.slow
def test_an_engine_from_scratch_keeps_the_contract_with_a_model_of_the_user(tmp_path):
    ((code, lines),) = run_ranks(1, said, f"{ENGINES}:Plain", "--model", tiny_model(tmp_path))
    assert lines == [f"{name}: passed" for name in NAMES] and len(NAMES) == 21
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", BROKEN)
def test_a_broken_engine_fails_in_the_cases_that_name_the_defect(engine):
    found = {case: failure for case, failure in run_contract(f"{ENGINES}:{engine}") if failure}
    cases, said = BROKEN[engine]
    assert tuple(found) == cases
    assert found[cases[0]].startswith(f"failed: {said}")


def test_ctrl_c_ends_the_contract_and_not_a_case():
    def interrupted(bench):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome(interrupted, None)


@pytest.mark.slow
def test_the_documentation_shows_what_the_contract_says_about_a_broken_engine():
    ((code, lines),) = run_ranks(1, said, f"{ENGINES}:DropsTheStopToken")
    assert [line.split(":")[0] for line in lines if "failed" in line] == ["stop_ids_end_a_response"]
    assert code == 1
    page = Path(__file__).parents[2].joinpath("docs", "extending.md").read_text()
    command = "$ python -m lightrft.engine.testing my_engine.py:MyEngine\n"
    shown = page.partition(command)[2].partition("```")[0]
    assert shown.splitlines() == [*lines[:3], "...", *lines[7:10], "..."]
