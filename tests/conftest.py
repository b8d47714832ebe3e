"""Every test runs offline and on one thread; `gpu` tests are skipped where there is no accelerator."""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import pytest  # noqa: E402  (the environment comes first)
import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
