"""What the text of a program that is compiled for a GPU says."""

import math
import re


def launches(program: str) -> int:
    """Kernels and copies of a decode step: of the computation that attends."""
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", program)
    steps = [
        text for text in computations if re.search("(biased_attention|paged_attention|step_in_groups)_attend", text)
    ]
    return sum(len(re.findall(r" (?:fusion|custom-call|copy)\(", text)) for text in steps)


def most_operands(program: str) -> int:
    """Of a matrix product with what is fused into it."""
    return max((text.count("%") for text in re.findall(r"gemm_fusion\S* = \S+ fusion\((.*?)\)", program)), default=0)


def most_results(program: str) -> int:
    """Of a launch that XLA fuses."""
    return max((text.count("[") for text in re.findall(r" = \((.*?)\) fusion\(", program)), default=0)


def largest_copy(program: str) -> int:
    """Elements of the largest array that a launch does nothing to but copy."""
    shapes = re.findall(r" = \w+\[([\d,]+)\]\S* copy(?:-start)?\(", program)
    return max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0)
