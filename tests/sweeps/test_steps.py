"""Every method keeps its budget at every step, as a method of each kind does in the ordinary tests."""

import pytest

from tests.support.methods import every_method, fitted_method, named
from tests.test_decoding import HALF, KINDS, assert_budget_at_every_step

OTHERS = [method for method in every_method(HALF) if named(method) not in KINDS]


@pytest.mark.parametrize("method", [*OTHERS, fitted_method(HALF)], ids=named)
def test_a_method_keeps_its_budget_at_every_step(method):
    assert_budget_at_every_step(method)
