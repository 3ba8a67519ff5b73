#!/usr/bin/env bash
# Every claim of the README on the GPUs of this machine: 40 minutes, no network (benchmarks/gpu_day/__main__.py). The
# first 12 say what a step takes. --prepare puts the texts that the runs read into out/gpu_day-prepared, on any machine:
# the folder travels with the repository. It prepares no kernels: torch stores compiled code only where it can load it
# (benchmarks/gpu_day/first_minutes.py). The runs put theirs there for one another, and for the next day on such a card.
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
