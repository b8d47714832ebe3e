"""Why: a label that is right after all would make an honest run look like one that is gamed."""

import pytest

from lightrft.config.errors import ConfigError
from lightrft.core.samples import Prompt
from lightrft.extras.canaries.rows import CanaryRows, plain
from lightrft.extras.ledger.answers import answer_reader


def prompts(*labels: object) -> list[Prompt]:
    return [Prompt(row, f"{row}?", [row], {"label": label}) for row, label in enumerate(labels)]


def test_a_canary_has_the_label_of_another_row():
    rows = CanaryRows(prompts("5", "5.0", "7", 7, "9"), seed=0, swaps=True)

    for position in range(10):
        canary = rows[position]
        assert canary.prompt.text == f"{canary.prompt.index}?"
        false, right = str(canary.prompt.columns["label"]), str(canary.true_label)
        assert plain(false) != plain(right)
        assert plain(false) in ("5", "7", "9")


def test_labels_with_working_differ_in_what_the_reward_reads():
    labels = [f"{step} and then {step + 1} #### {step % 3}" for step in range(30)]
    rows = CanaryRows(prompts(*labels), seed=0, swaps=True, answer=answer_reader("gsm8k"))

    for position in range(30):
        canary = rows[position]
        assert canary.prompt.columns["label"][-1] != canary.true_label[-1]
    assert rows.chance == pytest.approx(1 / 3)


def test_alternatives_do_not_overlap():
    rows = CanaryRows(prompts(["yes", "Yes"], "yes", "no"), seed=0, swaps=True)

    assert {str(rows[position].prompt.columns["label"]) == "no" for position in range(3)} == {
        True,
        False,
    }
    assert all(
        "no" in (str(rows[position].prompt.columns["label"]), str(rows[position].true_label))
        for position in range(3)
    )


def test_the_data_keep_their_labels():
    data = prompts("5", "7")
    CanaryRows(data, seed=0, swaps=True)[0]

    assert [prompt.columns for prompt in data] == [{"label": "5"}, {"label": "7"}]


def test_a_guess_earns_what_the_most_frequent_label_does():
    assert CanaryRows(prompts("a", "a", "a", "b"), seed=0, swaps=True).chance == 0.75


def test_rows_of_the_user_stay_as_they_are():
    rows = CanaryRows(prompts("5", "5"), seed=0, swaps=False)

    assert {rows[position].prompt.columns["label"] for position in range(4)} == {"5"}


@pytest.mark.parametrize("labels", [("5", None), ("5", 5.0)], ids=["one is missing", "equal"])
def test_data_without_two_labels_are_refused(labels):
    with pytest.raises(ConfigError, match="a row has none, or no two differ"):
        CanaryRows(prompts(*labels), seed=0, swaps=True)
