"""The inline PTX of the kernels in Triton's interpreter: what only CUDA runs, tested on a CPU.

A thread is one pack of elements, in row-major order, and a warp 32 threads that follow each other. Branches must be
uniform over a warp, as the kernels make them. Memory that a kernel does not clear holds garbage.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

TYPES = {"b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8"}
DYNAMIC_BYTES = 1 << 17
GARBAGE = 0x5A
INTEGER = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "add": np.add, "sub": np.subtract,
    "mul": np.multiply, "min": np.minimum, "max": np.maximum, "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip

STATIC_BYTES = 1 << 15  # of .shared variables beside the one that begins at 0

_shared = np.zeros(DYNAMIC_BYTES + STATIC_BYTES, np.uint8)
_local: dict[str, np.ndarray] = {}
_kept: dict[str, np.ndarray] = {}  # registers that are declared outside of a block: of all threads, for later blocks


def _parse(asm: str) -> list[str]:
    asm = re.sub(r"(?:^|(?<=;))\s*[{}]", " ", asm.strip())  # of blocks; others are around operands
    asm = re.sub(r"(\w+):\s", r"\1:;", asm + " ")
    return [line.strip() for line in asm.replace("\n", " ").split(";") if line.strip()]


class Threads:
    """Threads that run one asm statement together: a warp where it has branches, all of them where it has none."""

    def __init__(self, ids: np.ndarray, operands: dict[str, np.ndarray]) -> None:
        self.ids = ids
        self.registers = operands

    def run(self, lines: list[str]) -> None:
        labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
        at = steps = 0
        while at < len(lines):
            line = lines[at]
            at += 1
            steps += 1
            assert steps < 100_000, "a loop without end"
            if line.endswith(":"):
                continue
            if line.startswith(".reg"):
                self.declare_registers(line)
                continue
            if line.startswith("."):
                self.declare(line)
                continue
            guard = np.ones(self.ids.size, bool)
            if line.startswith("@"):
                name, line = line[1:].split(None, 1)
                guard = ~self.registers[name[1:]] if name[0] == "!" else self.registers[name]
            op, _, rest = line.partition(" ")
            if op == "bra":
                assert guard.all() or not guard.any(), f"a warp parts at {line}"
                if guard.all():
                    at = labels[rest.strip()]
                continue
            self.step(op.split("."), [a.strip() for a in re.split(r",(?![^{[]*[}\]])", rest)], guard)

    def declare(self, line: str) -> None:
        space, name, size = re.fullmatch(r"\.(shared|local) \.align \d+ \.b8 (\w+)\[(\d+)\]", line).groups()
        if space == "shared":
            start = 0 if name == "pyrlstats_shared" else DYNAMIC_BYTES
            _shared[start : start + int(size)] = GARBAGE
            _kept[name] = np.full(4096, start, np.uint32)
        elif name not in _local or _local[name].shape[1] != int(size) or len(self.ids) == 1:  # a kernel begins
            _local[name] = np.full((4096, int(size)), GARBAGE, np.uint8)

    def declare_registers(self, line: str) -> None:
        """Those of the whole kernel have the project's name before their own."""
        type_, names = re.fullmatch(r"\.reg \.(\w+) (.*)", line).groups()
        for declared in names.split(","):
            name, count = re.fullmatch(r"(\w+)(?:<(\d+)>)?", declared.strip()).groups()
            if name.startswith("pyrlstats_"):
                for one in [name] if count is None else [f"{name}{i}" for i in range(int(count))]:
                    _kept[one] = np.full((4096, np.dtype(TYPES[type_]).itemsize), GARBAGE, np.uint8).view(
                        TYPES[type_].replace("f", "u").replace("i", "u")
                    )[:, 0]

    def read(self, name: str, type_: str) -> np.ndarray:
        dtype = np.dtype(TYPES[type_])
        if name in _kept:
            return _kept[name][self.ids].view(dtype)
        if name == "%tid.x":
            return self.ids.astype(dtype)
        if name in self.registers:
            return self.registers[name].view(dtype)
        if name == "%laneid":
            return (self.ids % 32).astype(dtype)
        if name == "%dynamic_smem_size":
            _shared[:] = GARBAGE
            return np.full(self.ids.size, DYNAMIC_BYTES, dtype)
        if name == "global_smem":
            return np.zeros(self.ids.size, dtype)
        if re.fullmatch(r"0[fd][0-9a-f]+", name):
            bits = np.array(int(name[2:], 16), "u4" if name[1] == "f" else "u8")
            return np.full(self.ids.size, bits).view(dtype)
        value = int(name, 0) % (1 << 8 * dtype.itemsize)
        return np.full(self.ids.size, value, f"u{dtype.itemsize}").view(dtype)

    def write(self, name: str, value: np.ndarray, guard: np.ndarray) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
        if not guard.all():
            before = _kept[name][self.ids] if name in _kept else self.registers.get(name)
            if before is None:
                before = np.full((value.size, value.itemsize), GARBAGE, np.uint8).view(value.dtype)[:, 0]
            value = np.where(guard, value, before)
        if name in _kept:
            _kept[name][self.ids] = value
            return
        self.registers[name] = value

    def address(self, text: str) -> tuple[str, np.ndarray]:
        base, _, offset = text.strip("[]").partition("+")
        shift = sum(int(part) for part in offset.split("+") if part)
        if base in _local:
            return base, np.full(self.ids.size, shift)
        return "", self.read(base, "s32").astype(np.int64) + shift

    def load(self, text: str, dtype: np.dtype) -> np.ndarray:
        name, at = self.address(text)
        assert (at % dtype.itemsize == 0).all()
        bytes_ = at[:, None] + np.arange(dtype.itemsize)
        raw = _local[name][self.ids[:, None], bytes_] if name else _shared[bytes_]
        return np.ascontiguousarray(raw).view(dtype)[:, 0]

    def store(self, text: str, value: np.ndarray, guard: np.ndarray) -> None:
        name, at = self.address(text)
        assert (at % value.dtype.itemsize == 0).all()
        raw = np.ascontiguousarray(value).view(np.uint8).reshape(self.ids.size, -1)[guard]
        bytes_ = (at[:, None] + np.arange(value.dtype.itemsize))[guard]
        if name:
            _local[name][self.ids[guard][:, None], bytes_] = raw
        else:
            _shared[bytes_] = raw

    def step(self, op: list[str], a: list[str], guard: np.ndarray) -> None:
        kind, type_ = op[0], op[-1]
        dtype = np.dtype(TYPES[type_]) if type_ in TYPES else None
        if kind == "setp":
            result = COMPARE[op[1]](self.read(a[1], type_), self.read(a[2], type_))
            if len(a) == 4:
                result = result & self.registers[a[3]] if op[2] == "and" else result | self.registers[a[3]]
            self.write(a[0], result, guard)
        elif kind == "vote":
            assert guard.all()
            assert self.ids.size == 32
            self.write(a[0], np.full(32, getattr(self.registers[a[1]], op[2])()), guard)
        elif kind == "bar":
            assert guard.all()
            assert op[1:] == ["warp", "sync"]
            assert self.ids.size % 32 == 0
        elif kind == "mma":
            assert op[3] == "m8n8k4"
            assert guard.all()
            assert self.ids.size == 32
            left, right = (self.read(a[k].strip("{}"), "f64") for k in (1, 2))
            product = left.reshape(8, 4) @ right.reshape(8, 4).T
            for i, (to, add) in enumerate(zip(*(a[k].strip("{}").split(",") for k in (0, 3)), strict=True)):
                self.write(to.strip(), self.read(add.strip(), "f64") + product[:, i::2].reshape(32), guard)
        elif kind == "redux":
            assert guard.all()
            assert self.ids.size == 32
            self.write(a[0], np.full(32, self.read(a[1], type_).max(), dtype), guard)
        elif kind in ("mov", "or") and type_ == "pred":
            result = self.registers[a[1]].copy()
            self.write(a[0], result if kind == "mov" else result | self.registers[a[2]], guard)
        elif kind == "selp":
            self.write(a[0], np.where(self.registers[a[3]], self.read(a[1], type_), self.read(a[2], type_)), guard)
        elif kind == "mov" and a[0].startswith("{"):
            words = self.read(a[1], "u64").view(np.uint32).reshape(-1, 2)
            for half, name in enumerate(a[0].strip("{}").split(",")):
                self.write(name.strip(), words[:, half], guard)
        elif kind == "mov" and a[1].startswith("{"):
            words = [self.read(name.strip(), "u32") for name in a[1].strip("{}").split(",")]
            self.write(a[0], np.stack(words, axis=1).view(np.uint64)[:, 0], guard)
        elif kind == "mov":
            self.write(a[0], self.read(a[1], type_).copy(), guard)
        elif kind == "not":
            self.write(a[0], ~self.read(a[1], type_), guard)
        elif kind == "abs":
            self.write(a[0], np.abs(self.read(a[1], type_)), guard)
        elif kind == "cvt":
            self.write(a[0], self.read(a[1], op[-1]).astype(TYPES[op[-2]]), guard)
        elif kind in ("fma", "mad"):
            x, y, z = (self.read(name, type_) for name in a[1:])
            exact = (lambda t: t.astype(np.float64)) if type_ == "f32" else (lambda t: t)
            self.write(a[0], (exact(x) * exact(y) + exact(z)).astype(dtype), guard)
        elif kind == "ld":
            names = a[0].strip("{}").split(",")
            for i, name in enumerate(names):
                at = f"[{a[1].strip('[]')}+{dtype.itemsize * i}]"
                self.write(name.strip(), self.load(at, dtype), guard)
        elif kind == "st":
            for i, name in enumerate(a[1].strip("{}").split(",")):
                at = f"[{a[0].strip('[]')}+{dtype.itemsize * i}]"
                self.store(at, self.read(name.strip(), type_), guard)
        elif kind == "red":
            _, at = self.address(a[0])
            value = self.read(a[1], type_)
            ufunc = np.add if op[2] == "add" else np.maximum
            ufunc.at(_shared.view(dtype), at[guard] // 4, value[guard])
        elif kind in INTEGER:
            x = self.read(a[1], type_)
            y = self.read(a[2], type_)
            self.write(a[0], INTEGER[kind](x, y).astype(dtype), guard)
        else:
            raise NotImplementedError(".".join(op))


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any, _semantic: Any = None
) -> Any:
    """tl.inline_asm_elementwise, in the interpreter."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    asm, pack = getattr(asm, "value", asm), getattr(pack, "value", pack)
    args = [arg if isinstance(arg, tl.tensor) else tl.to_tensor(arg, _semantic=_semantic) for arg in args]
    arrays = np.broadcast_arrays(*(arg.handle.data.reshape(arg.shape) for arg in args))
    shape = arrays[0].shape
    flat = [np.ascontiguousarray(array).reshape(-1, pack) for array in arrays]
    kinds = getattr(constraints, "value", constraints).split(",")
    outputs = sum(kind.startswith("=") for kind in kinds)
    for k, kind in enumerate(kinds[outputs::pack]):
        if kind == "f":  # the interpreter makes a subnormal argument of a kernel float64
            flat[k] = flat[k].astype(np.float32)
    operands = {
        f"${outputs + k * pack + j}": array[:, j].view(f"u{array.itemsize}")
        for k, array in enumerate(flat)
        for j in range(pack)
    }
    lines = _parse(asm)
    n = flat[0].shape[0]
    step = 32 if any("bra " in line for line in lines) else n
    result = np.empty((n, pack), {"int32": "i4", "int64": "i8", "fp32": "f4", "fp64": "f8"}[str(dtype)])
    for first in range(0, n, step):
        here = slice(first, first + step)
        threads = Threads(
            np.arange(first, first + step), {name: value[here].copy() for name, value in operands.items()}
        )
        threads.run(lines)
        for j in range(pack):
            result[here, j] = threads.registers[f"${j}"].view(result.dtype)
    wanted = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(TensorHandle(result.reshape(shape), dtype), wanted)


def install(monkeypatch: Any) -> None:
    """Let the kernels take their CUDA ways in the interpreter."""
    import triton.language as tl

    from pyrlstats.backends.triton_gpu import launch

    start = launch._launch
    monkeypatch.setattr(tl, "inline_asm_elementwise", inline_asm_elementwise)
    monkeypatch.setattr(launch, "_has_many_rows", lambda device: True)
    monkeypatch.setattr(launch, "_launch", lambda *arguments: start(*arguments[:7], False, arguments[8]))
