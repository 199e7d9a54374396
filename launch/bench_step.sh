#!/usr/bin/env bash
# A whole GRPO step by this project, TRL and tunix in one run, alternating: bench_training.py says on what.
# An otherwise idle machine gives the least noise. Peers get environments of their own under the folder given first
# (default runs/peers): minutes and 4 GB the first time. Further arguments go to bench_training.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-runs/peers}"
source launch/peers.sh
install_peer "$folder"
install_tunix "$folder"
OMP_WAIT_POLICY=passive python launch/bench_training.py step --folder="$folder" --peer="$folder/venv/bin/python" \
  --tunix="$folder/tunix/bin/python" "${@:2}"
