#!/bin/sh
# GPU tests, then the benchmark, straight from the tree: sh benchmarks/gpu_all.sh [folder for the results] [benchmark options]
set -eu
cd "$(dirname "$0")/.."
out="${1:-.}"
[ $# -gt 0 ] && shift
export PYTHONPATH=. PYTHONUNBUFFERED=1
PYRLSTATS_BACKEND=torch python3 -m pytest tests/gpu -m gpu -q -p no:cacheprovider
python3 benchmarks/gpu_kernel.py --json "$out/gpu_kernel.json" "$@"
