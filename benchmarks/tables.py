"""Results as rows of text: one table a case, the same for terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ERRORS = {
    "ESS": "ess_fraction",
    "k3": "kl_k3",
    "p99.9": "abs_log_ratio_p99_9",
    "p99.99": "abs_log_ratio_p99_99",
}


@dataclass
class Table:
    """Cells of text; ``ours`` are the rows to set off, ``bad`` those without a time."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    ours: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, cells: list[str], ours: bool = False, bad: bool = False) -> None:
        if ours:
            self.ours.add(len(self.rows))
        if bad:
            self.bad.add(len(self.rows))
        self.rows.append(cells)


def seconds(value: float | None) -> str:
    """Three digits with a unit."""
    if value is None:
        return ""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1.0 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def span(figure: dict[str, float]) -> str:
    """p20 to p80, the unit once where it is the same."""
    low, high = seconds(figure["p20"]), seconds(figure["p80"])
    same = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same else low} to {high}"


def number(value: Any) -> float:
    """A float from JSON, where infinities are strings."""
    return math.nan if value is None else float(value)


def error_text(value: Any) -> str:
    if value is None:
        return ""
    error = number(value)
    if error == 0.0:
        return "0"
    return f"{error:.2%}" if 1e-4 <= error < 10 else f"{error:.0e}"


def mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / (1 << 20):,.1f}"


def of_case(case: dict[str, Any], gpu: bool) -> Table:
    """Time, spread, roofline fraction, memory and errors of every contender of one case."""
    spec = case["spec"]
    title = (
        f"{case['name']} ({case['tokens']:,} tokens, {spec['slices']} slices, {spec['dtype']}, "
        f"{spec['distribution']}, masks: {spec['masks']}"
        + ("" if gpu else f", {case['threads']} thread{'s' if case['threads'] > 1 else ''}")
        + ("" if case["cold"] else ", inputs in cache")
        + ")"
    )
    has_memory = any(row.get("peak_bytes") is not None for row in case["rows"])
    columns = ["contender", "to numbers", "p20 to p80", "vs ours"]
    columns += ["device", "host"] if gpu else ["pass"]
    columns += ["of roofline", *(["peak MiB"] if has_memory else []), *(f"error {name}" for name in ERRORS)]
    table = Table(title, columns)
    ours = ours_of(case)
    for row in case["rows"]:
        if row["status"] != "ok":
            shown = [row["contender"], {"wrong": "**wrong**", "failed": "failed", "skipped": "skipped"}[row["status"]]]
            blank = [""] * (len(columns) - len(shown) - len(ERRORS))
            table.add(shown + blank + _errors(row), bad=True)
            table.notes.append(f"{row['contender']}: {row['status']}: {row['reason']}")
            continue
        total = row["seconds"]
        ratio = total["median"] / ours["seconds"]["median"] if ours is not None else None
        cells = [
            row["contender"],
            seconds(total["median"]),
            span(total) if total["samples"] > 1 else "1 sample",
            "" if ratio is None else "1" if row is ours else f"{ratio:.3g}x",
        ]
        if gpu:
            device = row.get("device_seconds")
            cells += [seconds(device["median"]) if device else "", seconds(row["launch_seconds"]["median"])]
        else:
            cells.append(seconds(row["launch_seconds"]["median"]) if row["family"] == "ours" else "")
        fraction = row.get("roofline_fraction")
        cells.append("" if fraction is None else f"{fraction:.0%}")
        if has_memory:
            cells.append(mebibytes(row.get("peak_bytes")))
        table.add(cells + _errors(row), ours=row["family"] == "ours")
    for reader in case["ceilings"]:
        rate = case["bytes"] / reader["seconds"]["median"] / 1e9
        table.notes.append(f"{reader['name']}: {seconds(reader['seconds']['median'])}, {rate:,.1f} GB/s")
    return table


def ours_of(case: dict[str, Any]) -> dict[str, Any] | None:
    """The first row of ours that has a time: what "vs ours" compares with."""
    for row in case["rows"]:
        if row["family"] == "ours" and row["status"] == "ok":
            found: dict[str, Any] = row
            return found
    return None


def _errors(row: dict[str, Any]) -> list[str]:
    errors = row.get("errors", {})
    return [error_text(errors.get(name)) for name in ERRORS.values()]


def summary(document: dict[str, Any], axis: str) -> Table:
    """One row a case of an axis: ours, its fraction of the roofline, and how much longer the others take."""
    found = [case for case in document["cases"] if case["axis"] == axis]
    names = list(dict.fromkeys(row["contender"] for case in found for row in case["rows"]))
    gpu = document["device"] == "cuda"
    first = next((row["contender"] for case in found for row in case["rows"] if row["family"] == "ours"), "")
    others = [name for name in names if name != first]
    table = Table(axis, [axis, f"{first}: to numbers", "device" if gpu else "pass", "of roofline", *others])
    for case in found:
        ours = ours_of(case)
        by_name = {row["contender"]: row for row in case["rows"]}
        label = case["name"].split(": ", 1)[-1]
        if ours is None:
            table.add([label, "", "", "", *([""] * len(others))], bad=True)
            continue
        inner = (ours.get("device_seconds") or ours["launch_seconds"])["median"]
        cells = [label, seconds(ours["seconds"]["median"]), seconds(inner), f"{ours['roofline_fraction']:.0%}"]
        for name in others:
            row = by_name.get(name)
            if row is None:
                cells.append("")
            elif row["status"] == "ok":
                cells.append(f"{row['seconds']['median'] / ours['seconds']['median']:.3g}x")
            else:
                cells.append(row["status"])
                table.notes.append(f"{label}: {name}: {row['status']}: {row['reason']}")
        table.add(cells)
    return table


def of_training_step(step: dict[str, Any]) -> Table:
    plain = step["plain_seconds"]
    table = Table(
        f"a training step: {step['parameters'] / 1e6:.3g}M parameters, {step['tokens']:,} tokens in "
        f"{step['micro_batches']} micro-batches, {step['dtype']}, {step['slices']} slices; "
        f"without statistics {seconds(plain['median'])} ({span(plain)})",
        ["variant", "step", "overhead, median of paired steps", "p20 to p80"],
    )
    for row in step["rows"]:
        over = row["overhead"]
        table.add(
            [
                row["variant"],
                seconds(row["seconds"]["median"]),
                f"{over['median']:+.2%}",
                f"{over['p20']:+.2%} to {over['p80']:+.2%}",
            ],
            ours="pyrlstats" in row["variant"],
        )
    return table


def of_all_reduce(reduced: dict[str, Any]) -> Table:
    table = Table(
        f"all_reduce: {reduced['ranks']} ranks, {reduced['backend']}, {reduced['slices']} slices of "
        f"{reduced['tokens_per_rank']:,} tokens a rank",
        ["way", "time", "p20 to p80", "bytes a rank", "error"],
    )
    for row in reduced["rows"]:
        taken = row["seconds"]
        table.add(
            [
                row["contender"],
                seconds(taken["median"]) if taken else row["status"],
                span(taken) if taken else row["reason"],
                f"{row['bytes']:,}",
                error_text(row["error"]),
            ],
            ours="pyrlstats" in row["contender"],
            bad=taken is None,
        )
    return table


def of_document(document: dict[str, Any]) -> Iterator[Table]:
    """Every table of a run: headline cases in full, then one summary an axis."""
    gpu = document["device"] == "cuda"
    full = ("statistics", "quantiles", "streaming")
    for case in document["cases"]:
        if case["axis"] in full:
            yield of_case(case, gpu)
    if "rows" in document.get("training_step", {}):
        yield of_training_step(document["training_step"])
    if "rows" in document.get("all_reduce", {}):
        yield of_all_reduce(document["all_reduce"])
    for axis in dict.fromkeys(case["axis"] for case in document["cases"]):
        if axis not in full:
            yield summary(document, axis)
