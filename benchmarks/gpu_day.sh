#!/usr/bin/env bash
# Every claim of the README on the GPUs of this machine: 40 minutes, no network (benchmarks/gpu_day/__main__.py). The
# first 12 say what a step takes. What the runs read, and the kernels that they compile, are in out/gpu_day-prepared: a
# folder that may be made on another machine and travels with the repository.
#
#     bash benchmarks/gpu_day.sh --prepare                      # before a GPU is there
#     bash benchmarks/gpu_day.sh [WHEELS] [--only STEP ...]     # WHEELS: a folder of wheels, if something is missing
#     bash benchmarks/gpu_day.sh --list                         # the steps and their claims
#     bash benchmarks/gpu_day.sh --tiny                         # the same steps on a CPU
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [[ $# -gt 0 && -d $1 ]]; then
    site=out/gpu_day-site
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$1"/*.whl
    export PYTHONPATH="$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
    shift
fi
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
prepared=${GPU_DAY_PREPARED:-$PWD/out/gpu_day-prepared}
export HF_DATASETS_CACHE=$prepared/datasets TORCHINDUCTOR_CACHE_DIR=$prepared/inductor TRITON_CACHE_DIR=$prepared/triton
exec "$python" -m gpu_day "$@"
