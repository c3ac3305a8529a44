"""Every GPU kernel compiles to machine code for every target, without a GPU.

Run as a script (no TRITON_INTERPRET, a cache folder of its own) it compiles for one target. The newest Triton is the
one installed; PYRLSTATS_TRITON_36 names a folder with Triton 3.6 (pip install --target FOLDER triton==3.6.0).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def compile_all(target: str) -> None:
    """Compile each kernel with each way of counting that the target has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pyrlstats.backends.triton_gpu import digits, launch, pack, sequences  # finds the kernels in a source tree
    from pyrlstats.layout import CORE, Layout

    histogram, slice_hist, tile = launch.histogram, launch.slice_hist, launch.tile
    matrix = slice_hist.matrix
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    flat, strided = slice_hist.slice_hist_kernel, slice_hist.slice_hist_strided_kernel
    ways = histogram
    if backend == "cuda":
        variants = [
            (flat, tile.MASKS, 4, ways.PATTERNS, "*bf16", "*i1", False),
            (flat, tile.MASKS, 4, ways.PATTERNS, "*fp32", "*i1", True),
            (flat, tile.IDS, 8, ways.SINGLE, "*fp32", "*i64", True),
            (flat, tile.ALL, 1, ways.SINGLE, "*fp16", "*fp16", False),
            (strided, tile.MASKS, 3, ways.SLICES, "*fp64", "*fp32", True),
            (flat, tile.MASKS, 4, ways.SLICES, "*fp32", "*i1", False),
        ]
    else:
        variants = [
            (flat, tile.MASKS, 4, ways.REGISTERS, "*bf16", "*i1", False),
            (strided, tile.IDS, 2, ways.GLOBAL, "*fp32", "*i64", True),
        ]
    for kernel, mode, slices, way, float_type, mask_type, has_base in variants:
        constants: dict[str, Any] = {
            "ROWS": 512 if way.value == ways.PATTERNS.value or slices == 8 else 256, "V": 8, "G": slices,
            "MODE": mode.value, "HAS_BASE": has_base, "ALIGNED": kernel is flat,
            "WHOLE": kernel is flat and mode.value == tile.IDS.value,
            **slice_hist.constants(Layout(), way.value),
        }  # fmt: skip
        types = {
            "logp_ptr": float_type, "old_ptr": float_type, "state_ptr": "*i64", "scratch_ptr": "*fp64",
            "ticket_ptr": "*i32", "low": "fp32", "high": "fp32", "n": "i64",
            **dict.fromkeys(("n_slices", "first", "run", "tail_bits"), "i32"),
            **dict.fromkeys(("mask0", "mask1", "mask2", "mask3", "base_ptr"), mask_type),
        }  # fmt: skip
        signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in kernel.arg_names}
        aligned = [["tt.divisibility", 16]]
        attributes = {(i,): aligned for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
        # The claim hides how much of it Triton uses: here it is no larger than what may be used before the merge,
        # which comes when the rows have been read.
        claims, together = histogram.CLAIMS, slice_hist.merge.BLOCK
        if way.value == ways.PATTERNS.value and has_base:
            histogram.CLAIMS = (launch.MANY_SPARE, launch.MANY_SPARE)
            slice_hist.merge.BLOCK = triton.language.constexpr(8)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=gpu, options={"num_warps": constants["ROWS"] // 32})
        assert compiled.asm.get("cubin") or compiled.asm.get("hsaco")
        if backend == "cuda":
            # what Triton itself uses lies before the histogram rows, or beside them in the 48 KiB of a program
            bins = Layout().bins_per_sign
            rows = histogram.shared_bytes(slices, bins, way.value)
            beside = matrix.shared_bytes(constants["ROWS"], slices, way.value)
            claimed = histogram.claimed(slices, bins, way.value, beside)
            shared = compiled.metadata.shared
            fits = shared == claimed if claimed else rows + beside + shared <= histogram.STATIC_BYTES
            assert fits, f"{kernel.__name__}: {rows} bytes of rows and {shared} of Triton's"
            histogram.CLAIMS, slice_hist.merge.BLOCK = claims, together
        sys.stdout.write(f"{triton.__version__} {target} {kernel.__name__} {mode.value} {way.value}\n")
    types = {
        "words_ptr": "*i64", **dict.fromkeys(("own_ptr", "common_ptr", "total_ptr", "out_ptr"), "*fp64"),
        "x_ptr": "*fp32", "member_ptr": "*u8", "logp_ptr": "*bf16", "old_ptr": "*fp32", "base_ptr": "*i1",
        **dict.fromkeys(("low_ptr", "width_ptr", "shift_ptr", "counts_ptr", "ends_ptr"), "*i64"),
        **dict.fromkeys(("n_integers", "n_sums", "n_maxima", "intervals", "parts", "n_slices", "first"), "i32"),
        **dict.fromkeys(("mask0", "mask1", "mask2", "mask3"), "*u8"),
    }  # fmt: skip
    digit = {"ABSOLUTE": False, "DIGITS": 2048, "FEW": digits.FEW, "BLOCK": digits.BLOCK}
    few = {"ROWS": 32, "LANES": 4, "V": sequences.TOKENS, "G": 4, "MODE": tile.MASKS.value, "HAS_BASE": False}
    many = few | {"ROWS": 1, "LANES": sequences.THREADS, "MODE": tile.IDS.value, "HAS_BASE": True}
    others = [
        (pack.pack_kernel, pack.constants(CORE)), (pack.unpack_kernel, pack.constants(None)),
        (digits.count_kernel, digit), (sequences.sums_kernel, few), (sequences.sums_strided_kernel, many),
    ]  # fmt: skip
    for kernel, constants in others:
        signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=gpu, options={"num_warps": 4})
        assert compiled.asm.get("cubin") or compiled.asm.get("hsaco")
        sys.stdout.write(f"{triton.__version__} {target} {kernel.__name__}\n")


if __name__ == "__main__":
    compile_all(sys.argv[1])
else:
    import pytest

    pytest.importorskip("triton")
    FOLDERS = {"newest": None, "3.6": os.environ.get("PYRLSTATS_TRITON_36")}

    @pytest.mark.slow
    @pytest.mark.parametrize("triton_version", FOLDERS)
    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target, triton_version, tmp_path):
        folder = FOLDERS[triton_version]
        if triton_version != "newest" and not folder:
            pytest.skip("PYRLSTATS_TRITON_36 names no folder with Triton 3.6")
        root = Path(__file__).resolve().parents[1]
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
        environment.pop("TRITON_INTERPRET", None)
        paths = [folder] if folder else []
        environment["PYTHONPATH"] = os.pathsep.join([*paths, str(root), environment.get("PYTHONPATH", "")])
        command = [sys.executable, str(Path(__file__).resolve()), target]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        assert done.stdout.count(target) >= 2
