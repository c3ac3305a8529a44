"""What ``gpu_kernel.py`` measured of the kernel alone, as tables."""

from __future__ import annotations

from typing import Any

from .tables import Table

# for the README: the usual inputs, and where the kernel loses most
HEADLINE = (
    "f32, 1 slice, one byte",
    "f32, 4 overlapping slices, one byte",
    "f32, 4 bool masks",
    "f32, 8 slice_ids int32",
    "bf16, 1 slice, one byte",
    "bf16, 4 overlapping slices, one byte",
    "f32, 1 slice, Laplace(1)",
    "f32, 4 slices, Laplace(1)",
    "f32, 4 slices, t2",
)


def rates(document: dict[str, Any], cases: tuple[str, ...] | None = None) -> Table:
    """Tokens and bytes a second of every case, or of those named, and the share of the reader's rate."""
    table = Table("the kernel alone", ["case", "Gtok/s", "GB/s", "of a kernel that only reads the same bytes"])
    rows = {row["case"]: row for row in document["rows"]}
    for name in rows if cases is None else cases:
        row = rows[name]
        table.add([name, f"{row['gtok_s']:.0f}", f"{row['gb_s']:.0f}", f"{row['of_R']:.0%}"])
    return table


def provenance(document: dict[str, Any]) -> str:
    """Machine, versions, commit and command of the run."""
    machine = document["machine"]
    return (
        f"One {machine['gpu']}; Python {machine['python']}, torch {machine['torch']}, Triton {machine['triton']}; "
        f"commit {document['commit']}: `{document['command']}`."
    )


def accuracy(document: dict[str, Any]) -> str:
    """The largest errors of the sums over many tokens."""
    exact, other = 0.0, 0.0
    for row in document["accuracy"]:
        exact = max(exact, row["near_x"], row["near_x2"], row["far_x"], row["far_x2"])
        other = max(other, *(value for name, value in row.items() if name != "case"))
    return (
        f"Over 1e9 tokens the sums of x and x² are within {exact:.1e} of float64 ones, all others within {other:.1e}, "
        f"relative to the sums of magnitudes{_earlier(document, 'accuracy')}."
    )


def _earlier(document: dict[str, Any], part: str) -> str:
    """Of which commit a part is, where that is another."""
    earlier = document.get("earlier", {})
    return f" (at commit {earlier['commit']})" if part in earlier.get("parts", ()) else ""
