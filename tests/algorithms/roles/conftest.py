import pytest

from algorithms.roles.rows import dense_scorer
from tiny import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="session")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="session")
def scorer_folder(folder: str) -> str:
    return dense_scorer(folder, seed=2)
