"""`lightrft test_rewards`: functions with planted faults, and the project's own."""

import json
from pathlib import Path

import pytest

from lightrft.config.sections import CommaSeparated, DataSection
from lightrft.extras.commands.debug.test_rewards import main
from lightrft.extras.tools.reward_tests import RewardTest, read_prompts

FAULTY = Path(__file__).parent / "faulty_rewards.py"
PLANTED = {
    "right": set(),
    "noisy": {"not deterministic"},
    "drifts": {"not deterministic"},
    "prefers_the_first": {"depends on the order"},
    "normalised": {"depends on the other responses"},
    "edits": {"changes the data"},
    "raises": {"raises"},
    "not_a_number": {"raises"},
    "constant": {"constant"},
    "inverted": {"disagrees with the labels"},
    "strict_ending": {"sensitive to white space"},
    "generous_to_nothing": {"pays for an empty response"},
    "reads_the_prompt": {
        "pays for the echoed prompt",
        "pays for a quotation of the prompt",
        "pays for several answers",
    },
    "any_answer": {"pays for several answers"},
    "substring": {"finds the answer in other words"},
    "slow": {"slow"},
}
"""Function -> what must be found. A fault may bring others with it."""
BUILT_IN = {
    "number": ("What is 17+4?", [str(n) for n in range(20, 32)]),
    "math": ("Solve it.", [rf"\frac{{{n}}}{{7}}" for n in range(1, 7)]),
    "choice": ("Which one? (A) x (B) y (C) z", [*"ABCABC"]),
    "f1": ("Who wrote it?", ["Ada Lovelace", "Alan Turing", "Grace Hopper"]),
    "format": ("Think.", ["x", "y"]),
    "length": ("Be brief.", ["x", "y"]),
}


def prompts_of(path: Path, rows: list[dict]) -> list:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(DataSection(prompt_data=CommaSeparated(str(path))), 32)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    rows = [
        {"input": f"{n} apples, or {n + 1}, or {n + 2}: which is it?", "label": str(n + 1)}
        for n in range(10, 22)
    ]
    # A busy machine makes no other function slow.
    limit = {"slow": 2e-3} if name == "slow" else {}
    test = RewardTest(f"{FAULTY}:{name}", prompts_of(tmp_path / "d.jsonl", rows), **limit)
    found = {finding.test for finding in test.run()}
    assert PLANTED[name] <= found
    assert PLANTED[name] or not found


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_rewards_have_no_fault(name: str, tmp_path: Path) -> None:
    text, labels = BUILT_IN[name]
    prompts = prompts_of(
        tmp_path / "d.jsonl", [{"input": text, "label": label} for label in labels]
    )
    assert not [finding for finding in RewardTest(name, prompts).run() if finding.is_fault]


def test_a_column_with_right_responses(tmp_path: Path) -> None:
    """Rewards that run a program or read a schema have no label."""
    rows = [
        {
            "input": "An object with one number.",
            "schema": {
                "type": "object",
                "required": [name],
                "properties": {name: {"type": "number"}},
            },
            "solution": json.dumps({name: 1}),
        }
        for name in ("width", "height", "depth")
    ]
    prompts = prompts_of(tmp_path / "d.jsonl", rows)
    assert not [
        finding
        for finding in RewardTest("json_schema", prompts, "solution").run()
        if finding.is_fault
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(
        "".join(f'{{"question": "{n}+{n}?", "answer": {2 * n}}}\n' for n in range(1, 10))
    )
    keys = ["--input_key=question", "--label_key=answer"]
    with pytest.raises(SystemExit) as ended:
        main(["number", str(data), *keys])
    assert ended.value.code == 0
    assert "number: no findings in 9 rows" in capsys.readouterr().out

    with pytest.raises(SystemExit) as ended:
        main([f"{FAULTY}:constant", str(data), *keys])
    assert ended.value.code == 1
    assert "fault  constant: every response gets 0.5" in capsys.readouterr().out

    with pytest.raises(SystemExit) as ended:
        main(["number", str(data), "--label_key=missing"])
    assert ended.value.code == 2
    assert "no column" in capsys.readouterr().err

    with pytest.raises(SystemExit) as ended:
        main(["number", str(data), "--input_key=missing"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no column 'missing' (--input_key); it has " in said and "bad_rows" not in said
