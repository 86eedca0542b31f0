"""What tests of several processes share."""

import pytest

from tests.support.job import answers, evaluated, small_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def alone(model, tmp_path_factory):
    """The answers of one device of one process."""
    folder = tmp_path_factory.mktemp("alone") / "results"
    evaluated(model, folder)
    return answers(folder)
