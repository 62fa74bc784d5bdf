"""The page's pictures, by matplotlib (the extra `pictures`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper import hybrid, scaling
from benchmarks.paper.facts import CLUSTERS
from benchmarks.paper.questions import Answers

_STYLE = {
    "svg.hashsalt": "dapple",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_OURS, _DP, _LATE, _IDEAL = "#0b5fa5", "#d9822b", "#9aa5b1", "#c8c8c8"
_Curve = tuple[str, str, str, list[float | None]]


PICTURES = (*CLUSTERS, "scaling")


def draw(
    answers: Answers, folder: Path, suffix: str = "svg", pictures: Iterable[str] = PICTURES
) -> list[Path]:
    """Draw pictures into a folder; equal numbers make equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for name in pictures:
            figure = _scaling(answers) if name == "scaling" else _panels(answers, name)
            paths.append(folder / f"paper-{name}.{suffix}")
            # Without a date, so that the same numbers make the same file.
            extra = {"metadata": {"Date": None}} if suffix == "svg" else {"dpi": 110}
            figure.savefig(paths[-1], **extra)  # type: ignore[arg-type]
    return paths


def _row(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(2.5 * count, 2.9), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _curves(axes: Axes, places: Iterable[float], curves: Iterable[_Curve]) -> None:
    where = list(places)
    for label, colour, marker, values in curves:
        known = [(x, y) for x, y in zip(where, values, strict=True) if y is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            axes.plot(xs, ys, marker, color=colour, label=label, linewidth=1.6, markersize=4.5)
    axes.set_ylim(bottom=0)


def _panels(answers: Answers, cluster: str) -> Figure:
    figure, panels = _row(len(hybrid.SHOWN))
    for axes, model in zip(panels, hybrid.SHOWN, strict=True):
        points = hybrid.panel(answers, model, cluster)
        batches = [point.batch for point in points]
        _curves(
            axes,
            batches,
            [
                ("DP, no overlap", _LATE, "^-", [p.no_overlap for p in points]),
                ("DP, overlap", _DP, "s-", [p.overlap for p in points]),
                ("our plan", _OURS, "o-", [p.hybrid for p in points]),
            ],
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_ylim(0, 16.5)
        axes.set_yticks([0, 4, 8, 12, 16])
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("global batch size")
    panels[0].set_ylabel("speedup over one device")
    _legend(figure, panels[0])
    figure.suptitle(f"Configuration {cluster[-1].upper()}, 16 devices, simulated", fontsize=11)
    return figure


def _scaling(answers: Answers) -> Figure:
    figure, panels = _row(len(scaling.SHOWN))
    for axes, model in zip(panels, scaling.SHOWN, strict=True):
        points = scaling.points(answers, model)
        devices = [float(point.devices) for point in points]
        _curves(
            axes,
            devices,
            [
                ("ideal", _IDEAL, "--", [float(point.devices) for point in points]),
                ("DP, overlap", _DP, "s-", [point.overlap for point in points]),
                ("our plan", _OURS, "o-", [point.ours for point in points]),
            ],
        )
        axes.set_xticks(devices)
        axes.set_yticks([0, 4, 8, 12, 16])
        axes.set_title(f"{model}, {scaling.BATCHES[model]}", fontsize=10)
        axes.set_xlabel("devices")
    panels[0].set_ylabel("speedup over one device")
    _legend(figure, panels[0])
    figure.suptitle("Configuration A, a fixed batch on more devices, simulated", fontsize=11)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
