"""Every test runs offline and on one thread; `gpu` tests are skipped where there is no accelerator."""

import os
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
os.environ.setdefault("RESTARTED_RANKS", tempfile.mkstemp(prefix="restarted_ranks")[1])  # of all processes that share the tests
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise torch.cuda.is_available() makes CUDA unusable in forked ranks

import pytest  # noqa: E402  (the environment comes first)
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("repeatable", deadline=None, derandomize=True)  # the same examples, however busy the machine is
settings.load_profile("repeatable")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the restarts even where warnings are not."""
    file = Path(os.environ.get("RESTARTED_RANKS", os.devnull))
    for line in file.read_text().splitlines() if file.is_file() else ():
        terminalreporter.write_line(f"ranks hung and were started once more in {line}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have the names of folders too
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
