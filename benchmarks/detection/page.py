"""Fills the tables of docs/monitor.md from the results, and draws the ROC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"
FIGURE = Path(__file__).parents[1] / "results" / "detection.png"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(results: dict[str, Any]) -> None:
    """Replace what lies between the page's markers by the tables there are results for."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        table = TABLES[name](results) if _has(results, name) else None
        return match.group(0) if table is None else f"{match.group(1)}{table}\n{match.group(3)}"

    PAGE.write_text(_BLOCK.sub(fill, PAGE.read_text()))
    if "roc" in results and "tokens" in results:
        _draw(results)


def _has(results: dict[str, Any], name: str) -> bool:
    part, _, inner = _NEEDS.get(name, name).partition("/")
    return part in results and (not inner or inner in results[part])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100.0 * share:.{digits}f} %"


def _steps(delay: float | None) -> str:
    return "-" if delay is None else f"{delay:.0f}"


def _false_alarms(results: dict[str, Any]) -> str:
    rows = results["false_alarms"]
    return _table(
        (f"noise ({rows[0]['runs']} runs of {rows[0]['steps']} steps)", "any warning", "stop"),
        ((row["noise"], _percent(row["warnings"]), _percent(row["stops"])) for row in rows),
    )


def _together(results: dict[str, Any]) -> str:
    rows = results["together"]

    def cells(said: dict[str, Any]) -> list[str]:
        low, high = said["interval"]
        either = f"{_percent(said['either'])} ({100 * low:.1f} to {100 * high:.1f})"
        return [_percent(said["detectors"]), _percent(said["rules"]), either]

    return _table(
        (
            f"noise ({rows[0]['runs']} runs of {rows[0]['steps']} steps)",
            *(f"any {what}: {who}" for what in ("warning", "stop") for who in ("detectors", "rules", "either (95 %)")),
            "rules that warned, in runs",
        ),
        (
            (
                row["noise"],
                *cells(row["warnings"]),
                *cells(row["stops"]),
                ", ".join(f"`{name}` {count}" for name, count in row["rules"].items()) or "-",
            )
            for row in rows
        ),
    )


def _long_run(results: dict[str, Any]) -> str:
    runs = results["long_run"]
    return _table(
        ("rules", "steps", "memory", "a step", "CPU", "folder, snapshots", "opened again"),
        (
            (
                "built in" if run["rules"] else "none",
                f"{row['steps']:,}",
                f"{row['MB']:.0f} MB",
                f"{row['ms a step']:.1f} ms",
                f"{row['CPU ms a step']:.1f} ms" if "CPU ms a step" in row else "-",
                *(
                    (
                        f"{run['folder MB']:,.0f} MB, {run['snapshots']}",
                        f"in {run['resumed']['seconds']:.2f} s, {run['resumed']['MB']:.0f} MB",
                    )
                    if row is run["rows"][-1]
                    else ("", "")
                ),
            )
            for run in runs
            for row in run["rows"]
            if str(row["steps"])[0] == "1" or row is run["rows"][-1]
        ),
    )


def _delays(results: dict[str, Any]) -> str:
    watched = results["delays"][0]["signals"]
    return _table(
        (f"growth of one signal of {watched}", "warned", "steps, p50", "p90", "stopped", "steps, p50"),
        (
            (
                row["growth"],
                _percent(row["warning found"]),
                _steps(row["warning delay p50"]),
                _steps(row["warning delay p90"]),
                _percent(row["stop found"]),
                _steps(row["stop delay p50"]),
            )
            for row in results["delays"]
        ),
    )


def _cell(outcome: dict[str, Any]) -> str:
    return f"{_steps(outcome['delay'])} ({_percent(outcome['found'], 0)})"


def _single(results: dict[str, Any]) -> str:
    rows = results["single"]
    rates = [key for key in rows[0] if re.fullmatch(r"0\.\d+", key)]
    return _table(
        ("detector", "false alarms", *(f"{100 * float(rate):g} % a step" for rate in rates)),
        ((row["detector"], _percent(row["false alarms"]), *(_cell(row[rate]) for rate in rates)) for row in rows),
    )


def _tokens(results: dict[str, Any]) -> str:
    rows = results["tokens"]["at equal false alarms"]
    shares = [key for key in rows[0] if re.fullmatch(r"0\.\d+", key)]
    return _table(
        ("detector", *(f"{100 * float(share):g} % of the tokens" for share in shares)),
        ((row["detector"], *(_cell(row[share]) for share in shares)) for row in rows),
    )


def _monitor(results: dict[str, Any]) -> str:
    monitor, toolkit = results["tokens"]["monitor"], results["tokens"]["toolkit"]
    rows = []
    for share, row in monitor.items():
        other = toolkit[share if share != "0" else "0.0"]
        kl = row["global KL over its baseline at the warning"]
        rows.append(
            (
                "none" if share == "0" else f"{100 * float(share):g} %",
                _percent(row["warned"] + row["warned before the onset"]),
                _steps(row["delay p50"]),
                _steps(row["delay p90"]),
                "-" if kl is None else f"{kl:.2f}",
                _percent(row["stopped"]),
                f"{_percent(other['stopped'])}, at step {_steps(other['step p50'])}",
            )
        )
    head = ("tokens that grow", "warned", "steps, p50", "p90", "global KL then", "stopped", "known toolkit stops")
    return _table(head, rows)


def _noise(results: dict[str, Any]) -> str:
    rows = results["recorded"]["noise"]["noise"]
    return _table(
        ("slice", "signal", "sd of the logarithm", "lag-1 correlation"),
        ((row["slice"], f"`{row['signal']}`", f"{row['sd']:.2f}", f"{row['rho']:.2f}") for row in rows),
    )


def _recorded_delays(results: dict[str, Any]) -> str:
    noise = results["recorded"]["noise"]
    rows = [("none: false warnings, stops", f"{_percent(noise['warnings'])}, {_percent(noise['stops'])}", "-")]
    rows += [(row["growth"], _percent(row["found"]), _steps(row["delay p50"])) for row in noise["delays"]]
    return _table(("growth of post_tool's p99.9", "warned", "steps, p50"), rows)


def _course(results: dict[str, Any]) -> str:
    parts = []
    for name, run in results["recorded"]["runs"].items():
        rows = [
            (
                f"{row['from']}-{row['to']}",
                f"{row['staleness']:.0f}",
                *(f"{row[f'{slice_} p99.9']:.2g}" for slice_ in ("text", "pre_tool", "post_tool")),
                f"{row['post_tool ESS']:.3f}",
                f"{row['global KL']:.1e}",
                f"{row['loss']:+.4f}",
                f"{row['reward']:.2f}",
                f"{row['entropy']:.3f}",
            )
            for row in run["course"]
        ]
        head = (
            "steps",
            "stale by",
            "text p99.9",
            "pre_tool",
            "post_tool",
            "post_tool ESS",
            "global KL",
            "loss",
            "reward",
            "entropy",
        )
        said = "\n".join(f"- step {alert['step']}, {alert['level']}: {alert['message']}" for alert in run["alerts"])
        parts.append(f"`{name}`\n\n{_table(head, rows)}\n\n{said or 'No alert.'}")
    return "\n\n".join(parts)


def _machine(results: dict[str, Any]) -> str:
    return f"Measured on: {results['machine']}."


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "false_alarms": _false_alarms,
    "together": _together,
    "long_run": _long_run,
    "delays": _delays,
    "single": _single,
    "tokens": _tokens,
    "monitor": _monitor,
    "noise": _noise,
    "recorded_delays": _recorded_delays,
    "course": _course,
    "machine": _machine,
}
_NEEDS = {
    "monitor": "tokens",
    "noise": "recorded/noise",
    "recorded_delays": "recorded/noise",
    "course": "recorded/runs",
}


def _draw(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11.0, 4.2), layout="constrained")
    one, two = picture.subplots(1, 2)
    share = 100.0 * results["tokens"]["roc share"]
    for axes, curves, title in (
        (one, results["roc"], "one signal, 0.5 % a step: found within 50 steps"),
        (two, results["tokens"]["roc"], f"{share:g} % of the tokens, 2 % a step: found within 100 steps"),
    ):
        for name, points in curves.items():
            x, y = zip(*sorted(points), strict=True)
            ours = name.startswith("pyrlstats")
            axes.plot(x, y, linewidth=2.2 if ours else 1.1, marker="." if "river" in name else None, label=name)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("share of stationary runs with a false alarm")
        axes.set_ylabel("share of runs found in time, no alarm before")
        axes.set_xlim(0.0, 0.5)
        axes.legend(fontsize="xx-small")
    picture.savefig(FIGURE, dpi=100)
