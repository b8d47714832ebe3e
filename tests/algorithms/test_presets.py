"""Why: a recipe sets what the user left open.

A misspelt field or a lost flag would train something else than the recipe says.
"""

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.kl import kl_estimators
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config import SECTIONS, Config, parse, section_of_field
from lightrft.config.presets import PRESETS, recipe


def fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_args(kind):  # a union
        return any(fits(value, option) for option in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_exists_with_a_value_of_its_type(name):
    hints = {
        field: kind for cls in SECTIONS.values() for field, kind in get_type_hints(cls).items()
    }
    for field, value in PRESETS[name].items():
        assert field in hints, f"{name}: no field {field}"
        assert fits(value, hints[field]), f"{name}: {field} = {value!r} is no {hints[field]}"


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_recipe_names_is_registered(name):
    assert name in estimators
    assert PRESETS[name].get("policy_loss", "ppo") in policy_losses
    assert PRESETS[name].get("kl_estimator", "k3") in kl_estimators


def test_fits_can_tell():
    assert fits(0.2, float) and fits(None, float | None) and fits("k3", Literal["k1", "k3"])
    assert (
        not fits("0.2", float)
        and not fits(True, float)
        and not fits("k4", Literal["k1", "k3"])
        and not fits(None, int)
    )


def test_grpo_is_the_paper():
    assert recipe("grpo") == {
        "policy_loss": "ppo",
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "use_kl_loss": True,
        "init_kl_coef": 0.04,
        "kl_estimator": "k3",
    }


def test_another_name_of_an_estimator_brings_the_same_recipe():
    assert recipe("group_norm") == recipe("grpo")


def test_a_users_own_estimator_has_no_recipe():
    assert recipe("my_package.mine:estimator") == {}


def test_expansion_sets_what_is_open_and_leaves_what_was_written():
    config = parse(["--init_kl_coef", "0.5", "--eps_clip_low=0.1"])
    before = config.rollout.rollout_batch_size
    config.expand(
        {
            "init_kl_coef": 0.04,
            "eps_clip_low": 0.2,
            "eps_clip_high": 0.28,
            "use_kl_loss": True,
            "seed": 7,
        }
    )
    assert (config.algorithm.init_kl_coef, config.algorithm.eps_clip_low) == (0.5, 0.1)

    assert (config.algorithm.eps_clip_high, config.algorithm.use_kl_loss, config.train.seed) == (
        0.28,
        True,
        7,
    )
    assert config.rollout.rollout_batch_size == before


@pytest.mark.parametrize("arguments", [["--use_kl_loss", "false"], ["--use_kl_loss=false"]])
def test_a_switch_that_was_turned_off_stays_off(arguments):
    config = parse(arguments)
    config.expand({"use_kl_loss": True})
    assert config.algorithm.use_kl_loss is False


def test_a_recipe_for_an_unknown_field_is_an_error():
    with pytest.raises(KeyError):
        Config().expand({"eps_clipp": 0.2})
    assert "eps_clipp" not in section_of_field()
