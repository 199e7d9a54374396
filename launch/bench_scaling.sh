#!/usr/bin/env bash
# Curves of what a step costs against session, group, sessions, width, masks and devices: bench_scaling.py says how.
# Some minutes on an otherwise idle machine. Results go to the folder given first (default runs/scaling).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OMP_WAIT_POLICY=passive python launch/bench_scaling.py --out="${1:-runs/scaling}" "${@:2}"
