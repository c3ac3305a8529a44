from typing import Final, TypeAlias, TypedDict

class _BuildConfig(TypedDict):
    version: str
    compiler: str
    flags: str
    instruction_sets: dict[str, str]
    usable: list[str]

_Operand: TypeAlias = tuple[int, int, tuple[int, ...] | None]

STATE_VERSION: Final[int]
DTYPES: Final[dict[str, int]]
DIGITS: Final[int]

def accumulate(
    state: int,
    slices: int,
    layout: tuple[int, int, int],
    clip: tuple[float, float],
    shape: tuple[int, ...],
    byte_strides: bool,
    logp: _Operand,
    old_logp: _Operand,
    masks: tuple[_Operand, ...] | None,
    slice_ids: _Operand | None,
    base_mask: _Operand | None,
    num_threads: int,
    isa: str = "",
) -> None: ...
def count_digits(
    counts: int,
    intervals: list[tuple[int, ...]],
    absolute: bool,
    slices: int,
    shape: tuple[int, ...],
    byte_strides: bool,
    logp: _Operand,
    old_logp: _Operand,
    masks: tuple[_Operand, ...] | None,
    slice_ids: _Operand | None,
    base_mask: _Operand | None,
    num_threads: int,
    isa: str = "",
) -> None: ...
def accumulate_groups(
    sections: tuple[int, int, int, int],
    truncate: tuple[float, float],
    clip: tuple[float, float, float],
    advantages: _Operand | None,
    updates: int,
    boundaries: int,
    sequences: int,
    sums: int,
    slices: int,
    shape: tuple[int, ...],
    byte_strides: bool,
    logp: _Operand,
    old_logp: _Operand,
    masks: tuple[_Operand, ...] | None,
    slice_ids: _Operand | None,
    base_mask: _Operand | None,
    num_threads: int,
    isa: str = "",
) -> None: ...
def build_config() -> _BuildConfig: ...
