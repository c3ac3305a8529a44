"""The tool: a pocket calculator with a two-digit display."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

DIGITS = 2
ERROR = "!" * DIGITS

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

_EXPRESSION = re.compile(r"(\d+)([+*-])(\d+)", re.ASCII)


def show(number: int) -> str:
    """A number as the display shows it: its last two digits (7 is 07, 408 is 08, -1 is 99)."""
    return f"{number % 10**DIGITS:0{DIGITS}}"


def calculate(expression: str) -> str:
    """What the display shows after typing one operation, such as ``12*34``; ``!!`` for anything else."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return ERROR
    left, sign, right = match.groups()
    return show(OPERATIONS[sign](int(left), int(right)))
