"""The paper's claims recomputed: `python -m benchmarks.paper` writes docs/paper.md."""
