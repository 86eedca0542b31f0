"""What a step tells the other chips: collectives in the text of a compiled program."""

import math
import re
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "f8": 8, "s4": 4, "u4": 4}

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_CALL = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_CALL_OR_LOOP = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.-]+)")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*\w*)\[([0-9,]*)\]")


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind in one decode step: how many, and the bytes that a chip sends for them."""

    kind: str
    count: int
    bytes: float


def per_step(text: str, devices: int) -> tuple[Collective, ...]:
    """The collectives of one round of a program's loop over steps.

    Branches of conditionals are left out: they compress, and most steps do not. Loops inside count once.
    """
    computations, entry = _computations(text)
    outside = _reached(computations, entry, _CALL)
    bodies = [name for outer in outside for line in computations[outer] for name in _BODY.findall(line)]
    step = max((_reached(computations, body, _CALL_OR_LOOP) for body in bodies), key=len, default=set())
    found = [one for name in sorted(step) for line in computations[name] if (one := _parsed(line, devices))]
    return tuple(
        Collective(kind, len(sizes), sum(sizes))
        for kind in KINDS
        if (sizes := [size for name, size in found if name == kind])
    )


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the program's own."""
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = result.setdefault(head[1], [])
            entry = head[1] if line.startswith("ENTRY") else entry
        else:
            lines.append(line)
    return result, entry


def _reached(computations: dict[str, list[str]], start: str, called: re.Pattern[str]) -> set[str]:
    """`start` and all that it calls, in one of these ways; branches of conditionals are in neither."""
    reached: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in reached and name in computations:
            reached.add(name)
            todo += [other for line in computations[name] for other in called.findall(line)]
    return reached


def _parsed(line: str, devices: int) -> tuple[str, float] | None:
    """The kind of a line's collective and the bytes that a chip sends for it; None of other lines."""
    match = _COLLECTIVE.match(line)
    if match is None or (ways := group_size(line, devices)) == 1:
        return None
    shape, kind, start = match.groups()
    sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
    # The start of these shows what goes in beside what comes out.
    both = start and kind in ("all-gather", "collective-permute", "all-to-all", "reduce-scatter")
    return kind, sent(kind, max(sizes) if both else sum(sizes), ways)


def sent(kind: str, size: float, ways: int) -> float:
    """Bytes that each of `ways` chips sends for a collective whose result has `size` bytes, around a ring.

    A reduce-scatter's result is a part, and an all-reduce is a reduce-scatter and an all-gather.
    """
    match kind:
        case "all-reduce":
            return 2 * size * (ways - 1) / ways
        case "reduce-scatter":
            return size * (ways - 1)
        case "collective-permute":
            return size
    return size * (ways - 1) / ways


def group_size(line: str, devices: int) -> int:
    """How many devices take part, in any of the ways that compilers write it."""
    if found := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[[0-9,]*?(\d+)\]<=", line):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([0-9,]+)\}", line):
        return len(found[1].split(","))
    return devices


def _bytes(dtype: str, shape: str) -> float:
    bits = next((bits for name, bits in _BITS.items() if dtype.startswith(name)), None)
    bits = int("".join(re.findall(r"\d+", dtype)) or 0) if bits is None else bits
    return math.prod(map(int, filter(None, shape.split(",")))) * bits / 8
