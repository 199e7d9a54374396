"""Memory systems behind one protocol: what is compared on a benchmark. How answers are scored is for `evaluation`."""
