#!/usr/bin/env bash
# Attribution by this project and by its peers (context-cite, scikit-learn) in one run, alternating, on one real model:
# SmolLM2-135M, float32. Prints ratios; an otherwise idle machine gives the least noise. The peers get an environment of
# their own under the folder given (default runs/peers), which takes some minutes and 2 GB the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-runs/peers}"

source launch/peers.sh
install_peer "$folder"
OMP_WAIT_POLICY=passive python launch/bench_attribution.py --folder="$folder" --peer="$folder/venv/bin/python"
