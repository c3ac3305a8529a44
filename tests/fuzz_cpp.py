"""Random calls of the compiled CPU engine under AddressSanitizer and UndefinedBehaviorSanitizer, against the reference.

``make fuzz`` builds the extension with both (GCC or Clang on Linux) and runs this for ``FUZZ_SECONDS``. Every call has
inputs of its own shape, dtypes, strides, masks, ids, layout, clip, threads and instruction set, in memory that ends
where they end: a read or write beyond them stops the process with a report. Results are compared with the reference
backend as in the tests, results of several threads with those of one to the bit.

``--emulated`` calls the kernels of AVX-512 and NEON too, emulated (tests/emulated); without sanitizers, with which that
takes too long to compile.

Prints the seed of a call that fails; ``--seed N --calls 1`` repeats it.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import extension

BUILD = extension.ROOT / "build" / "fuzz"
SANITIZERS = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
MANY = 300_000  # tokens that several threads share
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
KINDS = ("gauss", "wide", "bits", "special", "zeros", "constant", "lattice")
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-38, 0.5, -0.5, 0.49999997, 88.0, -104.0, 3.4e38, math.inf, -math.inf, math.nan)


def build_sanitized() -> Path:
    """With sanitizers, built anew where a source has changed."""
    return extension.build(BUILD / "sanitized", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_CXX_FLAGS={SANITIZERS}")


def run_sanitized(core: Path, arguments: list[str]) -> int:
    """This script once more, in a process in which the sanitizer was loaded first."""
    compiler = os.environ.get("CXX", "c++")
    libraries = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")  # the second, so that the first finds whose exceptions to watch
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps what it has until the end; a failed allocation is an exception, as without sanitizers
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:{os.environ.get('UBSAN_OPTIONS', '')}",
    }
    command = [sys.executable, __file__, "--extension", str(core), *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def values_of(rng: Any, kind: str, shape: tuple[int, ...]) -> Any:
    """Log-ratios, float64."""
    import numpy as np

    if kind == "gauss":
        return rng.normal(0.0, 10.0 ** rng.uniform(-6, 0), shape)
    if kind == "wide":
        return rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-42, 38, shape)
    if kind == "bits":
        patterns = np.asarray(rng.integers(0, 1 << 32, shape, np.uint32))
        with np.errstate(invalid="ignore"):  # signalling NaN
            return patterns.view(np.float32).astype(np.float64)
    if kind == "special":
        return rng.choice(SPECIAL, shape)
    if kind == "lattice":
        return rng.integers(-40, 40, shape) / 128.0
    return np.full(shape, 0.0 if kind == "zeros" else rng.normal() * 10.0 ** rng.uniform(-3, 3))


def placed(rng: Any, values: Any, dtype: str, tensors: bool) -> Any:
    """The values as an array or tensor of a dtype with random strides, in memory that ends where they end.

    Dimensions of size 1 of ``values`` may be broadcast later. The memory between the elements holds other bits.
    """
    import numpy as np
    import torch

    steps = [0] * values.ndim
    extent = 1
    plain = rng.random() < 0.4
    for d in reversed(range(values.ndim)) if plain else rng.permutation(values.ndim):
        steps[d] = extent * (1 if plain else int(rng.choice([1, 1, 2, 3])))
        extent = steps[d] * max(values.shape[d] - 1, 0) + extent
        if not tensors and not plain and rng.random() < 0.3:
            steps[d] = -steps[d]
    lead = int(rng.integers(0, 5))
    start = lead + sum(-step * (size - 1) for step, size in zip(steps, values.shape, strict=True) if step < 0 < size)
    words = extent + lead if values.size else lead + 1
    with np.errstate(all="ignore"):
        if tensors:
            memory = torch.from_numpy(rng.integers(0, 200, words)).to(getattr(torch, dtype))
            tensor = memory.as_strided(values.shape, steps, min(start, words))
            # through float32 or int64, from which torch casts to everything
            tensor.copy_(torch.from_numpy(np.array(values, order="C")))
            return tensor
        size = np.dtype(dtype).itemsize
        shift = int(rng.random() < 0.2)  # not aligned
        memory = np.empty(words * size + shift, np.uint8)
        memory[:] = rng.integers(0, 256, memory.size, np.uint8)
        array = np.ndarray(
            values.shape, dtype, memory, shift + start * size if values.size else 0, [step * size for step in steps]
        )
        array[...] = values.astype(dtype)
        return array


def expanded(array: Any, shape: tuple[int, ...], tensors: bool) -> Any:
    import numpy as np

    return array.expand(shape) if tensors else np.broadcast_to(array, shape)


def shape_of(rng: Any) -> tuple[int, ...]:
    if rng.random() < 0.02:
        return (MANY,) if rng.random() < 0.5 else (MANY // 512, 512)
    dims = int(rng.integers(0, 5))
    most = {0: 1, 1: 20_000, 2: 150, 3: 30, 4: 9}[dims]
    sizes = [int(rng.integers(0, most)) if rng.random() < 0.1 else int(rng.integers(1, most + 1)) for _ in range(dims)]
    return tuple(1 if rng.random() < 0.1 else size for size in sizes)


def layout_of(rng: Any) -> Any:
    from pyrlstats.layout import Layout

    if rng.random() < 0.4:
        return Layout()
    octaves = 1 << int(rng.integers(0, 7))
    lowest = int(rng.integers(-126, 128 - octaves + 1))
    return Layout(int(rng.integers(0, 8)), lowest, lowest + octaves)


def broadcast_shape(rng: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if size > 0 and rng.random() < 0.2 else size for size in shape)


def masks_of(rng: Any, shape: tuple[int, ...], count: int, tensors: bool) -> list[Any]:
    import numpy as np

    masks = []
    for _ in range(count):
        values = rng.random(broadcast_shape(rng, shape)) < rng.choice([0.0, 0.01, 0.5, 0.99, 1.0])
        dtype = str(rng.choice(("bool", *INTEGERS, *(FLOATS if tensors else (*FLOATS[:1], *FLOATS[2:])))))
        numbers = values * rng.integers(1, 100, values.shape)
        mask = placed(rng, values if dtype == "bool" else np.asarray(numbers), dtype, tensors)
        masks.append(expanded(mask, shape, tensors))
    return masks


def one_call(seed: int, seen: Counter[str]) -> None:
    """Raises AssertionError where the engine differs from the reference."""
    import numpy as np
    import promises  # type: ignore[import-not-found]
    from conftest import Oracle  # type: ignore[import-not-found]

    from pyrlstats.backends import cpp, reference
    from pyrlstats.backends.batch import Batch
    from pyrlstats.state import State

    rng = np.random.default_rng(seed)
    tensors = bool(rng.random() < 0.5)
    floats = FLOATS if tensors else (FLOATS[0], *FLOATS[2:])
    shape = shape_of(rng)
    kind = str(rng.choice(KINDS))
    first, second = str(rng.choice(floats)), str(rng.choice(floats))
    x = values_of(rng, kind, shape)
    old = np.asarray(rng.normal(-1.0, 1.0, shape) if rng.random() < 0.5 else np.zeros(shape))
    with np.errstate(all="ignore"):
        logp, old_logp = placed(rng, x + old, first, tensors), placed(rng, old, second, tensors)
    slices, masks, ids = 1, None, None
    how = str(rng.choice(("masks", "ids", "all")))
    if how == "masks":
        slices = int(rng.choice([1, 2, 3, 4, 5, 8, 9, 17]))
        masks = tuple(masks_of(rng, shape, slices, tensors))
    elif how == "ids":
        slices = int(rng.choice([1, 2, 7, 8, 9, 33, 200]))
        dtype = str(rng.choice(INTEGERS))
        lowest = 0 if dtype.startswith("u") else -2
        numbers = rng.integers(lowest, min(slices + 3, 127), broadcast_shape(rng, shape))
        ids = expanded(placed(rng, np.asarray(numbers), dtype, tensors), shape, tensors)
    base = masks_of(rng, shape, 1, tensors)[0] if rng.random() < 0.4 else None
    batch = Batch(logp, old_logp, masks, ids, base)
    layout = layout_of(rng)
    while slices * layout.n_bins > 1 << 20:
        layout = type(layout)(layout.mantissa_bits - 1, layout.min_exp, layout.max_exp)
    clip = (float(rng.uniform(0.01, 0.99)), float(10.0 ** rng.uniform(-3, 3)))
    isa, threads = str(rng.choice(cpp.instruction_sets())), int(rng.integers(1, 5))
    seen.update((f"isa {isa}", how, first, kind, "tensors" if tensors else "arrays", f"{len(shape)} dimensions"))

    names = tuple(f"s{index}" for index in range(slices))
    device = "cpu" if tensors else None
    state, single, wanted, magnitudes = (State.empty(names, layout, clip, device) for _ in range(4))
    with np.errstate(all="ignore"):
        for _ in range(2 if rng.random() < 0.2 else 1):  # a state that holds something already
            cpp.accumulate(batch, state, threads, isa)
            cpp.accumulate(batch, single, 1, isa)
            reference.accumulate(batch, wanted)
            reference.accumulate(_of_magnitudes(batch), magnitudes)
    assert bool((state.buffer == single.buffer).all()), "other bits with more threads"
    states = (state.to_host(), wanted.to_host(), magnitudes.to_host())
    Oracle.check(*states, "differs from the reference", parts=promises.OTHER)
    _second_pass(rng, batch, slices, threads, isa)
    if slices <= 33:
        _groups(rng, batch, names, floats, threads, isa)


def _of_magnitudes(batch: Any) -> Any:
    import dataclasses

    import numpy as np
    import torch

    from pyrlstats.backends.reference import to_numpy
    from pyrlstats.reference import log_ratio

    x = np.asarray(np.abs(log_ratio(to_numpy(batch.logp), to_numpy(batch.old_logp))))
    zeros = np.zeros_like(x)
    if not isinstance(batch.logp, np.ndarray):
        x, zeros = torch.from_numpy(x), torch.from_numpy(zeros)
    return dataclasses.replace(batch, logp=x, old_logp=zeros)


def _second_pass(rng: Any, batch: Any, slices: int, threads: int, isa: str) -> None:
    """The digits of keys in random intervals, against the sorted tokens."""
    import numpy as np
    import torch

    from pyrlstats.backends import cpp, digits
    from pyrlstats.layout import INF_BITS

    absolute = bool(rng.random() < 0.5)
    shape = (slices, int(rng.integers(1, 4)))
    low = rng.integers(0 if absolute else -INF_BITS + 1, INF_BITS, shape)
    width = np.minimum((2.0 ** rng.uniform(0, 31, shape)).astype(np.int64), INF_BITS - low)
    width[rng.random(shape) < 0.2] = 0
    shift = np.maximum(np.ceil(np.log2(np.maximum(width, 1) / digits.DIGITS)), 0).astype(np.int64)
    fields = [low, width, shift]
    if not isinstance(batch.logp, np.ndarray):
        fields = [torch.from_numpy(field) for field in fields]
    intervals = digits.Intervals(*fields)
    got = np.asarray(cpp.count_digits(batch, intervals, absolute, threads, isa))
    wanted = np.asarray(digits._from_sorted(batch, intervals, absolute))
    assert np.array_equal(got, wanted), f"digits differ in {np.argwhere(got != wanted)[:5].tolist()}"


def _groups(rng: Any, batch: Any, names: tuple[str, ...], floats: tuple[str, ...], threads: int, isa: str) -> None:
    """The groups beside the core: counts and extrema as array operations make them, the same bits for any threads."""
    import dataclasses

    import numpy as np
    import torch

    from pyrlstats.backends import cpp
    from pyrlstats.groups import accumulate, sequences
    from pyrlstats.groups.options import Options, groups_of
    from pyrlstats.layout import Layout
    from pyrlstats.state import State

    shape, tensors = tuple(batch.logp.shape), not isinstance(batch.logp, np.ndarray)
    n = int(np.prod(shape))
    values = rng.normal(size=broadcast_shape(rng, shape))
    values[rng.random(values.shape) < 0.05] = rng.choice([np.nan, np.inf, 0.0])
    advantages = expanded(placed(rng, values, str(rng.choice(floats)), tensors), shape, tensors)
    boundaries = np.sort(rng.integers(0, n + 1, int(rng.integers(1, 50))))
    batch = dataclasses.replace(
        batch, advantages=advantages, boundaries=torch.from_numpy(boundaries) if tensors else boundaries
    )
    groups = groups_of(Options(True, True, 3.0, (0.5, float(rng.choice([2.0, np.inf]))), True, True), (0.2, 0.2))
    got, single, wanted = (State.empty(names, Layout(), (0.2, 0.2), "cpu" if tensors else None, groups) for _ in "123")
    with np.errstate(all="ignore"):
        updates, sums = cpp.fill_groups(batch, got, threads, isa)
        alone, sums_alone = cpp.fill_groups(batch, single, 1, isa)
        accumulate._fill(batch, wanted, lambda *_: None)
        members = np.asarray(sequences.sums(batch, len(names))[0])
    for one, other in ((got.buffer, single.buffer), (updates, alone), (sums, sums_alone)):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind == "f")
    assert np.array_equal(np.asarray(sums)[0], members), "tokens of sequences"
    for mine, theirs in zip(got.to_host().sections(), wanted.to_host().sections(), strict=True):
        if mine.table in ("truncation", "policy_clip"):
            assert np.array_equal(mine.counts, theirs.counts), mine.table
        if mine.table in ("truncation", "entropy"):
            assert np.array_equal(mine.maxima, theirs.maxima), mine.table


def fuzz(seconds: float, seed: int, calls: int | None) -> None:
    end = time.monotonic() + seconds
    seen: Counter[str] = Counter()
    done = 0
    while (time.monotonic() < end) if calls is None else (done < calls):
        print(f"\rseed {seed + done}", end="", flush=True)  # noqa: T201
        one_call(seed + done, seen)
        done += 1
    print(f"\n{done} calls agree with the reference: {dict(sorted(seen.items()))}")  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first call; each next one has the next seed")
    parser.add_argument("--calls", type=int, help="so many calls instead of so many seconds")
    parser.add_argument("--emulated", action="store_true", help="AVX-512 and NEON too, but no sanitizers")
    parser.add_argument("--extension", type=Path, help="one that is built already")
    options = parser.parse_args()
    if options.emulated:
        core = extension.build(BUILD / "emulated", extension.emulated())
    elif options.extension is None:
        return run_sanitized(build_sanitized(), sys.argv[1:])
    else:
        core = options.extension
    extension.load(core)
    fuzz(options.seconds, options.seed, options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
