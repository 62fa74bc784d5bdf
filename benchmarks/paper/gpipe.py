"""GPipe against early backward, really run: two processes, one cap on their accounted bytes.

    python -m benchmarks.paper.gpipe

The paper's comparison (BERT-48, two stages, micro-batch 2, M = 2, 5, 8, 16) with a BERT that is
scaled down until a micro-batch's activations are about half as large as parameters with gradients
and optimizer state, as on the paper's devices. The cap lies between what GPipe needs for M = 2 and
for M = 3. A cell fits if both the simulator's and the meter's peak of every rank stay below it;
those that fit are timed, all in the same two processes and in turn. Goals, for M = 16 against
GPipe's M = 2 without recompute: at least 95 % of the simulated ratio of throughputs, and at most
0.88 of GPipe's memory, the mean over the stages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.paper.figures import FOLDER
from benchmarks.paper.gpipe_measured import RESULTS, account, goals
from benchmarks.runtime.ranks import run_ranks, under_way
from dapple.records import Timeline
from dapple.reporting import check_picture, save_picture

SIZES = ("rounds", "rows", "width", "layers", "heads", "length", "recomputed", "counts")


def main() -> None:
    """Start the two ranks, print and write what they found; or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=224, help="tokens of a row")
    parser.add_argument("--counts", default="2,5,8,16", help="M of the runs")
    parser.add_argument("--recomputed", type=int, default=3, help="blocks of each stage")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="the figures, for docs/paper.md"
    )
    parser.add_argument(
        "--picture", type=Path, default=FOLDER / "really-run.svg", help="of four steps"
    )
    options = parser.parse_args()
    if under_way():
        from benchmarks.paper.gpipe_ranks import run

        run(options)
        return
    check_picture(options.picture)
    sizes = {name: getattr(options, name) for name in SIZES}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    found = sizes | run_ranks("benchmarks.paper.gpipe", 2, arguments)
    steps = {title: Timeline.model_validate(step) for title, step in found.pop("drawn").items()}
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save_picture(options.picture, steps)
    print(account(found))
    print(goals(found))


if __name__ == "__main__":
    main()
