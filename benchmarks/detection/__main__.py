"""Measures and writes benchmarks/results/detection.json, then the tables of docs/monitor.md: see ``--help``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.detection import family, page, recorded, single, together, tokens
from benchmarks.machine import describe, line

RESULTS = Path(__file__).parents[1] / "results" / "detection.json"

MEASURED: dict[str, Callable[[bool], Any]] = {
    "false_alarms": lambda quick: family.false_alarms(250 if quick else 1000, 2000),
    "together": lambda quick: together.false_alarms(50 if quick else 1000),
    "delays": lambda quick: family.delays(250 if quick else 1000),
    "single": lambda quick: single.compare(*(1000, 50) if quick else (10_000, 400)),
    "roc": lambda quick: single.roc(200 if quick else 2000),
    "tokens": lambda quick: tokens.compare(8 if quick else 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--only", choices=[*MEASURED, "recorded", "page"], nargs="+", help="what to measure")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--noise", type=Path, help="recorded run whose noise replaces the assumed one")
    parser.add_argument("--replay", type=Path, nargs="*", default=[], help="recorded runs to put before the monitor")
    parser.add_argument("--long-run", type=Path, nargs="*", default=[], help="results of long_run, --out, to show")
    parser.add_argument("--skip", type=int, default=20, help="steps of recorded runs that count for nothing")
    arguments = parser.parse_args()
    wanted = arguments.only or [*MEASURED, *(["recorded"] if arguments.noise else [])]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in wanted:
        start = time.perf_counter()
        if name == "recorded":
            results.setdefault(name, {})
            if arguments.noise:
                results[name]["noise"] = recorded.with_noise_of(arguments.noise, arguments.skip)
            for folder in arguments.replay:
                results[name].setdefault("runs", {})[folder.name] = recorded.replay(folder, arguments.skip, 100)
        elif name in MEASURED:
            results[name] = MEASURED[name](arguments.quick)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.long_run:
        results["long_run"] = [json.loads(file.read_text()) for file in arguments.long_run]
    results["machine"] = line(describe("cpu"))
    RESULTS.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    page.render(results)


if __name__ == "__main__":
    main()
