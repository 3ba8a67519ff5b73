#!/usr/bin/env bash
# Every claim of the README on the GPUs of this machine: 25 minutes, no network (benchmarks/gpu_day/__main__.py).
#
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
exec "$python" -m gpu_day "$@"
