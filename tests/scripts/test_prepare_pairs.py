"""Pairs of the answers that a model has sampled."""

import json

import pytest

from scripts.prepare_pairs import main

RIGHT = {"row": 0, "sample": 0, "prompt": "1+1=", "response": "2", "reward": 1.0}
RIGHT["finish_reason"] = "stop"
WRONG = RIGHT | {"sample": 1, "response": "3", "reward": 0.0}


def made(folder, responses):
    (folder / "responses.jsonl").write_text("".join(json.dumps(each) + "\n" for each in responses))
    main([f"--responses={folder}/responses.jsonl", f"--out={folder}/pairs"])
    return {
        path.stem: [
            (row["prompt"], row["chosen"], row["rejected"])
            for row in map(json.loads, path.read_text().splitlines())
        ]
        for path in (folder / "pairs").iterdir()
    }


def test_each_different_right_answer_meets_each_different_wrong_one(tmp_path):
    answers = [RIGHT, WRONG, RIGHT, WRONG, RIGHT | {"response": "2.0"}, WRONG | {"response": "4"}]
    assert made(tmp_path, answers) == {
        "train": [("1+1=", right, wrong) for right in ("2", "2.0") for wrong in ("3", "4")]
    }


def test_sets_and_rows_are_kept_apart(tmp_path):
    other = {"row": 1, "prompt": "1+1="}  # the same text, and perhaps another label
    answers = [RIGHT, WRONG, RIGHT | other | {"response": "10"}, WRONG | other]
    answers += [each | {"set": "test"} for each in (RIGHT, WRONG)]
    assert made(tmp_path, [each | {"set": "train"} for each in answers[:4]] + answers[4:]) == {
        "train": [("1+1=", "2", "3"), ("1+1=", "10", "3")],
        "test": [("1+1=", "2", "3")],
    }


@pytest.mark.parametrize(
    "left_out",
    [
        {"sample": "greedy"},
        {"response": ""},
        {"response": " \n"},
        {"finish_reason": "length"},
        {"row": 1},
    ],
)
def test_an_answer_without_a_partner_is_in_no_pair_and_no_pair_is_an_error(left_out, tmp_path):
    with pytest.raises(SystemExit, match="no prompt of train has both a right and a wrong answer"):
        made(tmp_path, [RIGHT, WRONG | left_out])
