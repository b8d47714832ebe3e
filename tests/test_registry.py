"""Names and import paths of user code, and errors that say where a name came from."""

import pytest

from lightrft.registry import Registry
from lightrft.rewards.functions import rewards as known_rewards


@pytest.fixture
def rewards() -> Registry:
    registry = Registry("reward", flag="--reward")
    registry.register("exact_match", "exact")(len)
    registry.register("gsm8k")(sum)
    return registry


def write(path, source):
    path.write_text(source)
    return str(path)


def test_by_name(rewards):
    assert rewards["exact_match"] is len and rewards["exact"] is len
    assert "gsm8k" in rewards and "missing" not in rewards
    assert rewards.names() == ["exact", "exact_match", "gsm8k"]


def test_a_name_is_taken_once(rewards):
    with pytest.raises(AssertionError, match="'gsm8k' is registered twice"):
        rewards.register("gsm8k")(len)


def test_by_module_path(rewards):
    import json.decoder

    assert rewards["json.decoder:JSONDecoder"] is json.decoder.JSONDecoder


def test_by_file_path(rewards, tmp_path):
    path = write(tmp_path / "mine.py", "def mine(samples): return [2.0]")
    assert rewards[f"{path}:mine"]([]) == [2.0]
    assert rewards[f"{path}:mine"] is rewards[f"{path}:mine"], "a file is executed once"


def test_files_of_the_same_name_do_not_meet(rewards, tmp_path):
    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(write(folder / "reward.py", f"number = {number}"))
    assert [rewards[f"{path}:number"] for path in paths] == [1, 2]


def test_unknown_name_shows_the_nearest_and_the_way_out(rewards):
    with pytest.raises(
        ValueError,
        match=r"--reward exact_mach: no reward of this name; did you mean 'exact_match'\?",
    ) as error:
        rewards["exact_mach"]
    assert "Choices: exact, exact_match, gsm8k" in str(
        error.value
    ) and "--reward module:object" in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("accuracy_reward", "'math'"),
        ("think_format_reward", "'format'"),
        ("mth", "'math'"),
        ("FILE:goood", "'good'"),
        ("FILE:Good", "'good'"),
        ("json:lods", "'loads'"),
    ],
)
def test_a_wrong_name_says_what_was_meant(tmp_path, name, meant):
    path = write(tmp_path / "mine.py", "def good(samples): return [1.0]\ndef _goood(): pass")
    with pytest.raises(ValueError, match=f"; did you mean {meant}"):
        known_rewards[name.replace("FILE", path)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "no_such_module:f",
            "--reward no_such_module:f: cannot import 'no_such_module': ModuleNotFoundError",
        ),
        ("/no/such/file.py:f", "--reward /no/such/file.py:f: no file /no/such/file.py"),
        (
            "json:no_such_object",
            "--reward json:no_such_object: 'json' has no object 'no_such_object'",
        ),
    ],
)
def test_errors_name_flag_and_path(rewards, name, reason):
    with pytest.raises(ValueError) as error:
        rewards[name]
    assert reason in str(error.value)


def test_an_error_inside_user_code_is_shown_and_not_remembered(rewards, tmp_path):
    path = write(tmp_path / "broken.py", "raise RuntimeError('half done')")
    with pytest.raises(ValueError, match="RuntimeError: half done"):
        rewards[f"{path}:f"]
    write(tmp_path / "broken.py", "f = 1")
    assert rewards[f"{path}:f"] == 1
