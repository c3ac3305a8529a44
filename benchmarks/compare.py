"""Two runs side by side: ratios of medians, and whether they stand out of the noise of both."""

from __future__ import annotations

from typing import Any

from .tables import Table, seconds

Document = dict[str, Any]
Key = tuple[str, str, str]  # case, contender, figure


def figures(document: Document) -> dict[Key, dict[str, float]]:
    """Every time of a run by what it is the time of."""
    found: dict[Key, dict[str, float]] = {}
    for case in document["cases"]:
        for row in case["rows"]:
            for name in ("seconds", "launch_seconds", "device_seconds"):
                # launch_seconds is a figure of its own only where collecting the numbers takes long
                if row.get(name) and (name != "launch_seconds" or row["family"] == "ours"):
                    found[case["name"], row["contender"], LABELS[name]] = row[name]
    for row in document.get("training_step", {}).get("rows", []):
        found["training step", row["variant"], "step"] = row["seconds"]
    for row in document.get("all_reduce", {}).get("rows", []):
        if row["seconds"]:
            found["all_reduce", row["contender"], "time"] = row["seconds"]
    return found


LABELS = {"seconds": "to numbers", "launch_seconds": "pass", "device_seconds": "device"}


def noise(figure: dict[str, float]) -> float:
    """Half the distance from p20 to p80 over the median; a single sample says nothing, so it counts as a third."""
    if figure["samples"] < 2:
        return 1 / 3
    return (figure["p80"] - figure["p20"]) / 2 / figure["median"]


def compare(before: Document, after: Document, everyone: bool = False) -> Table:
    """One row a figure that both hold: ratio after / before, noise of both together, verdict.

    Args:
        before, after: results of two runs.
        everyone: contenders too, not only ours.
    """
    old, new = figures(before), figures(after)
    table = Table(
        f"{before['machine']['commit']} ({before['date'][:10]}) → {after['machine']['commit']} ({after['date'][:10]})",
        ["case", "contender", "figure", "before", "after", "after / before", "noise", ""],
    )
    for key in (key for key in new if key in old):
        case, contender, figure = key
        if not everyone and "pyrlstats" not in contender:
            continue
        ratio = new[key]["median"] / old[key]["median"]
        spread = noise(old[key]) + noise(new[key])
        verdict = "" if abs(ratio - 1.0) <= spread else "faster" if ratio < 1.0 else "slower"
        table.add(
            [
                case,
                contender,
                figure,
                seconds(old[key]["median"]),
                seconds(new[key]["median"]),
                f"{ratio:.3f}",
                f"±{spread:.1%}",
                verdict,
            ],
            ours=verdict == "faster",
            bad=verdict == "slower",
        )
    for name in ("cpu", "gpu"):
        if before["machine"][name] != after["machine"][name]:
            table.notes.append(f"different machines: {before['machine'][name]} and {after['machine'][name]}")
    missing = {key[0] for key in old} - {key[0] for key in new}
    if missing:
        table.notes.append(f"only in the first: {', '.join(sorted(missing))}")
    return table
