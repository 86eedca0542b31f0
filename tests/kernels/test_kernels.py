"""Every backend of every op through the op's checks; the checks refuse what is broken; TPU kernels race no one."""

from functools import partial
from pathlib import Path

import pytest
from jax.experimental.pallas import tpu as pltpu

from clusterkv_jax.kernels import tuning
from tests.kernels.collect import CHECKS, OPS, VARIANTS

# Memory that nothing wrote holds NaN, reads out of bounds raise, and two cores are checked for races: slow.
STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2)


def test_every_op_has_its_file_and_every_check_something_to_refuse():
    folders = {file.parent.name for file in Path(tuning.__file__).parent.glob("*/__init__.py")}
    assert set(OPS) == folders
    checks = {check for of_variant in CHECKS.values() for check in of_variant}
    assert {check for op in OPS.values() for check, broken in op.BROKEN.items() if broken} == checks


@pytest.mark.parametrize(
    ("check", "implementation"),
    [
        pytest.param(check, implementation, id=f"{op}-{check.__name__}-{name}")
        for op, _, checks, backends in VARIANTS
        for check in checks
        for name, implementation in backends.items()
    ],
)
def test_the_op_is_its_definition(check, implementation):
    check(implementation)


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        pytest.param(check, broken, id=f"{op}-{check.__name__}-{broken.__name__}")
        for op, module in OPS.items()
        for check, wrong in module.BROKEN.items()
        for broken in wrong
    ],
)
def test_the_check_refuses_what_is_broken(check, broken):
    # The first case that tells ends the check; few cases may all miss an error that shows in one of five.
    with pytest.raises(AssertionError):
        check(broken, examples=100)


@pytest.mark.parametrize(
    ("check", "implementation", "shape"),
    [
        pytest.param(checks[0], backends["tpu"], shape, id=f"{op}-{heads}")
        for op, _, checks, backends in VARIANTS
        if "tpu" in backends
        for heads, shape in OPS[op].STRICT_SHAPES.items()
    ],
)
def test_tpu_kernels_race_no_one(check, implementation, shape, capfd):
    check(partial(implementation, interpret=STRICT), shapes=[shape], examples=1)
    assert "RACE" not in capfd.readouterr().out  # jax before 0.12 prints races instead of raising
