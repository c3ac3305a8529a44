"""A monitor over very many steps: ``python -m benchmarks.detection.long_run --steps 1000000``.

One process observes small statistics of one slice, and scalars, and writes down its memory and the time a step takes
as it goes; then another process resumes the folder. The statistics are made beforehand, so the times are the monitor's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pyrlstats import Monitor, slice_stats
from pyrlstats.monitor.rules_evaluation import RuleBook
from pyrlstats.slice_stats import SliceStats

MADE = 997  # different steps, repeated
SCALARS = ("reward", "loss", "entropy", "grad_norm", "length")


def steps_made(tokens: int) -> list[tuple[SliceStats, dict[str, float]]]:
    """Stationary steps."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(MADE):
        x = (0.01 * rng.standard_t(5, tokens)).astype(np.float32)
        scalars = {name: 1.0 + 0.1 * float(rng.standard_normal()) for name in SCALARS}
        made.append((slice_stats(x, np.zeros_like(x), {"post_tool": np.ones(tokens)}), scalars))
    return made


def memory() -> float:
    """Resident memory of this process, MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def observe(folder: Path, steps: int, tokens: int, rules: bool) -> dict[str, Any]:
    """All steps in this process; figures at 1, 2, 5, 10, ... thousand steps and at the end."""
    made = steps_made(tokens)
    monitor = Monitor(folder, RuleBook.load() if rules else None)
    shown = sorted({*(one * 10**power for power in range(3, 7) for one in (1, 2, 5) if one * 10**power < steps), steps})
    rows = []
    before, start, used = 0, time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        monitor.observe(step, *made[step % MADE])
        if step == shown[0]:
            shown.pop(0)
            spent = time.perf_counter() - start
            row = {"steps": step, "MB": memory(), "ms a step": 1e3 * spent / (step - before)}
            rows.append(row | {"CPU ms a step": 1e3 * (time.process_time() - used) / (step - before)})
            print(rows[-1], flush=True)
            before, start, used = step, time.perf_counter(), time.process_time()
    monitor.close()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    snapshots = len(list((folder / "snapshots").iterdir()))
    return {
        "tokens": tokens,
        "rules": rules,
        "rows": rows,
        "alerts": len(monitor.alerts),
        "lost": dict(monitor.lost),
        "folder MB": size / 1e6,
        "snapshots": snapshots,
    }


def resume(folder: Path, rules: bool) -> dict[str, float]:
    """Open the folder again: how long it takes, and the memory after it."""
    before = memory()
    start = time.perf_counter()
    monitor = Monitor(folder, RuleBook.load() if rules else None)
    spent = time.perf_counter() - start
    last = monitor._watcher.last_step
    monitor.close()
    return {"seconds": spent, "MB before": before, "MB": memory(), "last step": float(last or -1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the run is written, and left")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=300, help="a step")
    parser.add_argument("--rules", action="store_true", help="with the built-in rules")
    parser.add_argument("--resume", action="store_true", help="only open it again")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    if arguments.resume:
        print(json.dumps(resume(arguments.folder, arguments.rules)))
        return
    shutil.rmtree(arguments.folder, ignore_errors=True)
    result = observe(arguments.folder, arguments.steps, arguments.tokens, arguments.rules)
    command = [sys.executable, "-m", "benchmarks.detection.long_run", str(arguments.folder), "--resume"]
    done = subprocess.run([*command, *(["--rules"] if arguments.rules else [])], check=True, capture_output=True)
    result["resumed"] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
