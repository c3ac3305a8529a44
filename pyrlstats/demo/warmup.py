"""The start of training: episodes of the right form and random content, which teach to write calls, not which.

They stand in for pre-training. Every call is one random operation on numbers that are on screen, there are none, one
or two calls whatever the problem needs, and the answer is any number on screen: right only by chance.
"""

from __future__ import annotations

import random

from pyrlstats.demo.calculator import DIGITS, OPERATIONS
from pyrlstats.demo.slices import Role
from pyrlstats.demo.task import CALL, END, RUN, START, Environment, Problem, encode

Token = tuple[int, Role]


def random_episode(problem: Problem, rng: random.Random) -> list[Token]:
    """Tokens and roles of an episode that has the form of a solution and random content."""
    environment = Environment(problem)
    tokens = _with_role(START + problem.prompt, Role.PROMPT)

    def write(text: str) -> str:
        """Let the model write a text; returns what the tool said."""
        tokens.extend(_with_role(text, Role.MODEL))
        result = "".join(environment.write(symbol) for symbol in text)
        tokens.extend(_with_role(result, Role.TOOL))
        return result

    digits = "".join(symbol for symbol in problem.prompt if symbol.isdigit())
    numbers = [digits[start : start + DIGITS] for start in range(0, len(digits), DIGITS)]
    answers = list(numbers) if problem.calls else [digits]
    operations = [symbol for symbol in problem.prompt if symbol in OPERATIONS] or list(OPERATIONS)
    for _ in range(rng.choice((0, 1, 2))):
        result = write(CALL + rng.choice(numbers) + rng.choice(operations) + rng.choice(numbers) + RUN)
        numbers.append(result[-DIGITS:])
        answers.append(result[-DIGITS:])
    write(rng.choice(answers) + END)
    return tokens


def _with_role(text: str, role: Role) -> list[Token]:
    return [(token, role) for token in encode(text)]
