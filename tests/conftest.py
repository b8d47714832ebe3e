"""Run every test offline and on one thread; skip `gpu` tests where there is no accelerator."""

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# a quarter of the time in which modules are imported would be collections, which find nothing
gc.disable()
os.environ.update(
    OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1"
)
# of all processes that share the tests
os.environ.setdefault("RESTARTED_RANKS", tempfile.mkstemp(prefix="restarted_ranks")[1])
if "TEST_RUN" not in os.environ:  # the first of all processes that share the tests
    os.environ.update(
        TEST_RUN=tempfile.mkdtemp(prefix="test_run"), TEST_RUN_PROCESS=str(os.getpid())
    )
    atexit.register(
        lambda folder, owner: os.getpid() == owner and shutil.rmtree(folder),
        os.environ["TEST_RUN"],
        os.getpid(),
    )
# a C++ exception that nothing catches prints its stack
os.environ["TORCH_CUSTOM_TERMINATE"] = "1"
# otherwise torch.cuda.is_available() makes CUDA unusable in forked ranks
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import pytest  # noqa: E402  (the environment comes first)
from hypothesis import settings  # noqa: E402
from loguru import logger  # noqa: E402

from forks import keep_inherited_objects  # noqa: E402

CACHED = type(cache(len))
TESTS = Path(__file__).parent
LONGEST = (
    "engine/test_contract.py",
    "test_extras.py",
    "test_masked.py",
    "app/trainer/test_rollout_ranks.py",
    "engine/test_vllm.py",
    "app/trainer/test_recipes.py",
    "engine/test_sglang.py",
    "bench/test_memory.py",
    "app/trainer/test_environments.py",
    "engine/test_images.py",
    "engine/test_speculation.py",
    "algorithms/rollout/test_images.py",
    "algorithms/rollout/test_video_and_sound.py",
    "strategy/test_contract.py",
    "invariants/test_no_dead_flags.py",
    "engine/test_hybrids.py",
    "engine/test_experts.py",
    "app/trainer/test_resume.py",
    "extras/tools/test_planning.py",
    "app/trainer/test_collecting.py",
    "app/trainer/test_hybrids.py",
    "app/trainer/test_router_replay.py",
    "app/trainer/test_critic.py",
    "test_real_model.py",
)
"""Files that begin first, so that the last minutes of a run have short ones for all processes."""

# the same examples, however busy the machine is
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


keep_inherited_objects()
if "PYTEST_XDIST_WORKER" in os.environ:
    # after all other functions; taking the modules apart takes three seconds, and frees nothing
    atexit.register(os._exit, 0)
else:
    # otherwise libraries that look for leaks at exit report what is frozen
    atexit.register(gc.unfreeze)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile."""
    messages: list[str] = []
    handler = logger.add(messages.append, level="WARNING", format="{message}")
    yield messages
    logger.remove(handler)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free what a file's tests have left behind.

    Starting ranks takes longer the more memory this process has.
    """
    if nextitem is None or nextitem.path != item.path:
        for value in vars(item.module).values():
            if isinstance(value, CACHED) and value.__module__ == item.module.__name__:
                value.cache_clear()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name each failure at once, because a run that is cut short prints no summary."""
    if not report.failed:
        return None
    category = "failed" if report.when == "call" else "error"
    return category, f"\n{category.upper()} {report.nodeid}\n", category.upper()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the restarts even where warnings are not shown."""
    file = Path(os.environ.get("RESTARTED_RANKS", os.devnull))
    for line in file.read_text().splitlines() if file.is_file() else ():
        terminalreporter.write_line(f"ranks hung or aborted and were started once more in {line}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    import torch  # not in the process that only distributes the tests

    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have the names of folders too
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
