from pathlib import Path

import pytest

from tiny import tiny_experts, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of checkpoints."""
    return tmp_path / "checkpoints"
