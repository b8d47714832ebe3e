"""Ranks that hang or abort once are started again.

A second time in the same test run is a failure, with the stacks of all threads.
"""

import os
import threading
import time
from pathlib import Path

import pytest

import ranks


def hangs_at_first(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        threading.Thread(target=beside, daemon=True).start()
        time.sleep(60)
    return "done"


def aborts_at_first(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        os.abort()
    return "done"


def beside() -> None:
    time.sleep(60)


@pytest.mark.slow
def test_one_hang_is_forgiven_and_a_second_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_native_stacks", lambda pid: "")  # a debugger takes ten seconds
    monkeypatch.setenv(ranks.RESTARTS, str(tmp_path / "restarts"))
    with pytest.warns(
        UserWarning,
        match=r"hangs_at_first hung or aborted and is run once more(.|\n)*in beside(.|\n)*in hangs_at_first",
    ):
        assert ranks.run_ranks(1, hangs_at_first, tmp_path / "first", timeout=1) == ["done"]

    with pytest.raises(
        TimeoutError, match="ranks hung or aborted 2 times in this test run(.|\n)*in hangs_at_first"
    ):
        ranks.run_ranks(1, hangs_at_first, tmp_path / "second", timeout=1)

    assert (tmp_path / "restarts").read_text().count("test_one_hang_is_forgiven") == 2


def test_one_abort_is_forgiven_and_a_second_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv(ranks.RESTARTS, str(tmp_path / "restarts"))
    with pytest.warns(UserWarning, match=r"aborts_at_first hung or aborted(.|\n)*ended with -6"):
        assert ranks.run_ranks(1, aborts_at_first, tmp_path / "first") == ["done"]

    with pytest.raises(ranks.RankAborted, match="ranks hung or aborted 2 times in this test run"):
        ranks.run_ranks(1, aborts_at_first, tmp_path / "second")
