"""Why: a flag that nothing reads is a lie.

Functions name what they read, so the unread flags are known.
"""

import pytest

from lightrft.algorithms.options import options_of, resolve
from lightrft.algorithms.unread import unread
from lightrft.config import AlgorithmSection
from lightrft.core.table import keywords
from lightrft.registry import Registry

losses = Registry("loss", flag="--loss")


@losses.register("one")
def one(values, *, dual_clip, batch, scale=2.0):
    return values


@losses.register("other")
def other(values, *, eps_clip_low, dual_clip=None, **others):
    return values


def test_a_function_gets_what_it_names():
    section = AlgorithmSection(dual_clip=3.0)
    assert options_of(one, section) == {"dual_clip": 3.0}, "the batch comes from the caller"
    assert options_of(other, section) == {"eps_clip_low": 0.2, "dual_clip": 3.0}
    assert keywords(one) == {"dual_clip": True, "batch": True, "scale": False}


def test_unknown_arguments_are_named():
    with pytest.raises(ValueError, match="--loss one needs batch, which this run does not compute"):
        resolve(losses, "one")
    assert resolve(losses, "one", extra=("batch",)) is one and resolve(losses, "other") is other


companions = Registry("companion", flag="--loss")


@companions.register("one")
def companion(values, *, gamma):
    return values


def test_flags_of_companions_count_too():
    assert unread(losses, "other", {"gamma"}) == []
    assert unread(losses, "other", {"gamma"}, companions) == [
        "--gamma has no effect with --loss other"
    ]
    assert unread(losses, "one", {"gamma"}, companions) == []


def test_flags_of_other_functions_are_unread():
    written = {"dual_clip", "eps_clip_low", "gamma"}
    assert unread(losses, "one", written) == ["--eps_clip_low has no effect with --loss one"]
    assert unread(losses, "other", written) == []
    assert unread(losses, f"{__file__}:one", written) == [
        "--eps_clip_low has no effect with --loss " + f"{__file__}:one"
    ]
