# Environments of the peers, for the benchmarks beside: sourced, not run.

# install_peer FOLDER: transformers, trl and context-cite in FOLDER/venv.
install_peer() {
  if ! "$1/venv/bin/python" -c "import context_cite, trl" 2>/dev/null; then
    python -m venv "$1/venv"
    "$1/venv/bin/pip" install --quiet torch==2.13.0
    "$1/venv/bin/pip" install --quiet context-cite==0.0.4 trl==1.16.0 accelerate datasets transformers
  fi
}

# install_tunix FOLDER: google-tunix in FOLDER/tunix, which wants another JAX than the others.
install_tunix() {
  if ! "$1/tunix/bin/python" -c "import tunix" 2>/dev/null; then
    python -m venv "$1/tunix"
    "$1/tunix/bin/pip" install --quiet google-tunix==0.1.7 "jax<0.11.1"
  fi
}
