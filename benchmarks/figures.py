"""Plots of a run: time against tokens and against slices, errors, the training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tables import number

Document = dict[str, Any]
OURS = {"pyrlstats": "#0b6e4f", "pyrlstats, all threads": "#4cb38a", "pyrlstats accumulator": "#0b6e4f"}
OTHERS = ("#8d99ae", "#c44536", "#e09f3e", "#5f7adb", "#7b2d8b", "#2f4858")


def draw(document: Document, path: Path) -> None:
    """One PNG with four panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _scaling(panels[0][0], document, "tokens", "tokens", lambda case: case["tokens"])
    _scaling(panels[0][1], document, "slices", "slices", lambda case: case["spec"]["slices"], per_token=True)
    _accuracy(panels[1][0], document)
    _overhead(panels[1][1], document)
    hardware = document["machine"]["gpu"] or document["machine"]["cpu"]
    figure.suptitle(f"pyrlstats on {hardware}, commit {document['machine']['commit']}, {document['date'][:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _scaling(panel: Any, document: Document, axis: str, label: str, value: Any, per_token: bool = False) -> None:
    cases = [case for case in document["cases"] if case["axis"] == axis and case["spec"]["dtype"] == "float32"]
    curves: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for case in cases:
        scale = 1e9 / case["tokens"] if per_token else 1e3
        for row in case["rows"]:
            if row["status"] != "ok":
                continue
            times = {"": row["seconds"]}
            if row["family"] == "ours":
                times[", tokens pass"] = row.get("device_seconds") or row["launch_seconds"]
            for suffix, figure in times.items():
                point = {name: figure[name] * scale for name in ("median", "p20", "p80")}
                curves.setdefault(row["contender"] + suffix, []).append((value(case), point))
        best = min((reader["seconds"] for reader in case["ceilings"]), key=lambda found: found["median"])
        point = {name: best[name] * scale for name in ("median", "p20", "p80")}
        curves.setdefault("reading the bytes", []).append((value(case), point))
    shades = iter(OTHERS)
    for name, points in curves.items():
        own = name.removesuffix(", tokens pass")
        colour = OURS.get(own) or ("black" if name.startswith("reading") else next(shades, "grey"))
        style = ":" if name.startswith("reading") else "--" if name != own else "-"
        x = [at for at, _ in points]
        panel.plot(x, [point["median"] for _, point in points], style, color=colour, marker="o", ms=3, label=name)
        panel.fill_between(
            x, [point["p20"] for _, point in points], [point["p80"] for _, point in points], color=colour, alpha=0.15
        )
    panel.set(xscale="log", yscale="log", xlabel=label, ylabel="ns a token" if per_token else "ms")
    panel.set_title(f"time against {label}", loc="left")
    panel.grid(alpha=0.3)
    if curves:
        panel.legend(fontsize=7)


def _accuracy(panel: Any, document: Document) -> None:
    """Error of p99.9 and p99.99 against time, one point a contender of the first quantile case."""
    case = next((case for case in document["cases"] if case["axis"] == "quantiles"), None)
    if case is None:
        panel.set_axis_off()
        return
    for row in case["rows"]:
        errors = row.get("errors", {})
        if row["status"] != "ok" or "abs_log_ratio_p99_99" not in errors:
            continue
        colour = "#0b6e4f" if row["family"] == "ours" else "#c44536"
        error = max(number(errors["abs_log_ratio_p99_9"]), number(errors["abs_log_ratio_p99_99"]), 1e-5)
        panel.plot(row["seconds"]["median"] * 1e3, error, "o", color=colour)
        panel.annotate(
            row["contender"], (row["seconds"]["median"] * 1e3, error), fontsize=6, xytext=(3, 3), rotation=35,
            textcoords="offset points",
        )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="ms", ylabel="relative error (1e-5: exact)")
    panel.set_ylim(top=3.0)  # room for names
    panel.set_title(f"error of p99.9 and p99.99 against time ({case['name']})", loc="left")
    panel.grid(alpha=0.3)


def _overhead(panel: Any, document: Document) -> None:
    rows = document.get("training_step", {}).get("rows", [])
    if not rows:
        panel.set_axis_off()
        return
    names = [row["variant"] for row in rows][::-1]
    overs = [row["overhead"] for row in rows][::-1]
    medians = [100 * over["median"] for over in overs]
    spans = [
        [max(0.0, 100 * (over["median"] - over["p20"])) for over in overs],
        [max(0.0, 100 * (over["p80"] - over["median"])) for over in overs],
    ]
    colours = ["#0b6e4f" if "pyrlstats" in name else "#8d99ae" for name in names]
    panel.barh(names, medians, xerr=spans, color=colours, ecolor="#333333")
    panel.axvline(0, color="black", lw=0.8)
    panel.set(xlabel="% of a training step without statistics")
    panel.tick_params(axis="y", labelsize=7)
    panel.set_title("what monitoring costs a training step", loc="left")
    panel.grid(alpha=0.3, axis="x")
