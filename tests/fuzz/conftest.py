"""Ten thousand examples of a test make more circles of objects than memory holds until its module ends."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _circles_are_looked_for():
    gc.enable()
    yield
    gc.disable()
