"""Rules for people: the list, everything about one, and the reference page, all from the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import get_args

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pyrlstats.monitor.alerts import Link
from pyrlstats.monitor.rules import Rule, RuleSet
from pyrlstats.monitor.rules_names import nearest
from pyrlstats.watch.terminal import STYLES

LINKS: tuple[Link, ...] = get_args(Link)


def chosen(book: RuleSet, pattern: str) -> list[Rule]:
    """The rules that a name or a glob matches."""
    return [rule for rule in book.rules if fnmatchcase(rule.name, pattern)]


def nearest_rule(book: RuleSet, name: str) -> str:
    """ " (did you mean 'x'?)", or nothing."""
    return nearest(name, [rule.name for rule in book.rules])


def by_link(book: RuleSet) -> Iterator[tuple[Link, list[Rule]]]:
    """Rules by the link of the loop that they speak of."""
    for link in LINKS:
        rules = [rule for rule in book.rules if rule.link == link]
        if rules:
            yield link, rules


def listed(book: RuleSet) -> RenderableType:
    """Every rule in a table."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("fires on", overflow="fold")
    for link, rules in by_link(book):
        table.add_row(Text(link, style="bold cyan"), "", "")
        for rule in rules:
            what = Text(f"{rule.title}\n")
            what.append(rule.describe(), style="dim")
            table.add_row(Text(f"  {rule.name}"), Text(rule.level, style=STYLES[rule.level]), what)
    return Group(table, Text("\npyrlstats rules --explain NAME says what a rule means and what to do", style="dim"))


def explained(rule: Rule, book: RuleSet) -> RenderableType:
    """Everything about one rule."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in _about(rule, book):
        grid.add_row(title, Text(text))
    head = Text.assemble((rule.name, "bold"), "  ", (rule.level, STYLES[rule.level]), f"  {rule.title}")
    return Group(head, Padding(grid, (0, 0, 1, 2)))


def _about(rule: Rule, book: RuleSet) -> list[tuple[str, str]]:
    about = [
        ("link", rule.link),
        ("fires on", rule.describe() + (f", of slices {', '.join(rule.slices)}" if rule.slices else "")),
        ("means", rule.meaning),
        ("look first at", rule.look_at),
        ("try", rule.try_next),
    ]
    about += [(f"{name} is", _signal(name, book)) for name in _scalars(rule) if name in book.signals]
    return [(title, text) for title, text in about if text]


def _scalars(rule: Rule) -> list[str]:
    names: Sequence[str | None] = [
        name for each in rule.when for name in (each.scalar, each.divided_by_scalar, each.minus_scalar)
    ]
    return [name for name in dict.fromkeys(names) if name is not None]


def _signal(name: str, book: RuleSet) -> str:
    signal = book.signals[name]
    return f"{signal.meaning} (also {', '.join(signal.names)})" if signal.names else signal.meaning


def markdown(book: RuleSet) -> str:
    """The reference of all rules, and of the scalars they know under several names."""
    lines: list[str] = []
    for link, rules in by_link(book):
        lines += [f"### {link.capitalize()}", ""]
        for rule in rules:
            lines += [f"**`{rule.name}`** ({rule.level}): {rule.title}.", ""]
            slices = f", of slices {', '.join(f'`{each}`' for each in rule.slices)}" if rule.slices else ""
            lines += [f"- fires on: {rule.describe().replace('|', chr(92) + '|')}{slices}"]
            for title, text in (("means", rule.meaning), ("look first at", rule.look_at), ("try", rule.try_next)):
                lines += [f"- {title}: {text}"] if text else []
            lines.append("")
    lines += ["### Scalars and their names", "", "| scalar | what it is | also found as |", "|---|---|---|"]
    for name, signal in sorted(book.signals.items()):
        lines.append(f"| `{name}` | {signal.meaning} | {', '.join(f'`{each}`' for each in signal.names)} |")
    return "\n".join(lines)
