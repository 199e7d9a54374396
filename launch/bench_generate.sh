#!/usr/bin/env bash
# Generation by this project and by transformers in one run, alternating: bench_training.py says on what.
# An otherwise idle machine gives the least noise. Peers get environments of their own under the folder given first
# (default runs/peers): minutes and 2 GB the first time. Further arguments go to bench_training.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-runs/peers}"
source launch/peers.sh
install_peer "$folder"
OMP_WAIT_POLICY=passive python launch/bench_training.py generate --folder="$folder" --peer="$folder/venv/bin/python" \
  "${@:2}"
