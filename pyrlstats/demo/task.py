"""The task: problems, the environment that runs the tool inside an episode, and the reward.

An episode as the policy sees it, its own symbols marked below (the rest is the problem or the tool)::

    12*34+56?[12*34]>08[08+56]>64 64.      two calls, then the answer (the blank is only for the eye)
             ^^^^^^^   ^^^^^^^    ^^^
    #471902?471902.                        no tool needed: read a number back
            ^^^^^^^

The calculator takes one operation a call, so a problem of two operations needs its first result in the second call.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pyrlstats.demo.calculator import DIGITS, OPERATIONS, calculate, show

READ, ASK, CALL, RUN, RESULT, END = "#", "?", "[", "]", ">", "."
PAD, START = "_", "^"
SYMBOLS = (PAD, START, *"0123456789", *OPERATIONS, "!", READ, ASK, CALL, RUN, RESULT, END)
INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS)}

READ_DIGITS = 6
MAX_MODEL_SYMBOLS = 22  # of an episode; two calls and an answer take 17
MAX_CALLS = 3
MAX_LENGTH = 1 + (3 * DIGITS + 3) + MAX_MODEL_SYMBOLS + MAX_CALLS * (1 + DIGITS)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [INDEX[symbol] for symbol in text]


def decode(tokens: list[int]) -> str:
    """The text of token ids."""
    return "".join(SYMBOLS[token] for token in tokens)


@dataclass(frozen=True)
class Problem:
    """What is asked, and how it is solved.

    Attributes:
        prompt: the text the episode starts with.
        calls: the expressions to give to the calculator, in order; empty where no tool is needed.
        answer: the right answer.
    """

    prompt: str
    calls: tuple[str, ...]
    answer: str


def draw_problem(rng: random.Random) -> Problem:
    """A random problem: a number to read back, or one or two operations on two-digit numbers."""
    n_operations = rng.choice((0, 1, 2))
    if n_operations == 0:
        number = "".join(rng.choices("0123456789", k=READ_DIGITS))
        return Problem(READ + number + ASK, (), number)
    result = show(rng.randrange(10**DIGITS))
    prompt, calls = result, []
    for _ in range(n_operations):
        step = rng.choice(tuple(OPERATIONS)) + show(rng.randrange(10**DIGITS))
        prompt += step
        calls.append(result + step)
        result = calculate(calls[-1])
    return Problem(prompt + ASK, tuple(calls), result)


class Environment:
    """One episode: takes the policy's symbols one by one and runs the calculator when a call is complete.

    Attributes:
        calls: expressions the policy has sent to the calculator.
        answer: what it has written since the last result, outside a call.
        done: it has ended its answer, or used up its symbols or calls.
        finished: it has ended its answer.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.calls: list[str] = []
        self.answer = ""
        self.finished = False
        self._expression: str | None = None
        self._left = MAX_MODEL_SYMBOLS

    @property
    def done(self) -> bool:
        return self.finished or self._left == 0

    def write(self, symbol: str) -> str:
        """Take one symbol of the policy; returns what the tool inserts after it, mostly nothing."""
        self._left -= 1
        if self._expression is not None:
            if symbol != RUN:
                self._expression += symbol
                return ""
            return self._run(self._expression)
        if symbol == CALL:
            self._expression = ""
        elif symbol == END:
            self.finished = True
        else:
            self.answer += symbol
        return ""

    def _run(self, expression: str) -> str:
        self.calls.append(expression)
        self._expression = None
        self.answer = ""
        if len(self.calls) == MAX_CALLS:
            self._left = 0
        return RESULT + calculate(expression)

    @property
    def solved(self) -> bool:
        """The right answer was given, however it was found."""
        return self.finished and self.answer == self.problem.answer

    def reward(self) -> float:
        """Between 0 and 1: half for the right answer, half for the share of the way that is right.

        The way is the calls in order and then the answer, compared symbol by symbol in place; calls beyond the
        needed ones make each part count less.
        """
        wanted = (*self.problem.calls, self.problem.answer)
        written = (*self.calls, self.answer if self.finished else "")
        *calls, answer = (_share(*pair) for pair in _aligned(written, wanted))
        way = (sum(calls) + answer) / max(len(written), len(wanted))
        return 0.5 * self.solved + 0.5 * way


def _aligned(written: tuple[str, ...], wanted: tuple[str, ...]) -> list[tuple[str, str]]:
    """Calls beside calls in order, the answer beside the answer."""
    calls = list(zip(written[:-1], wanted[:-1], strict=False))
    return [*calls, (written[-1], wanted[-1])]


def _share(written: str, wanted: str) -> float:
    """Share of symbols that agree in place."""
    return sum(a == b for a, b in zip(written, wanted, strict=False)) / max(len(written), len(wanted))
