"""Plots beside the tables: what a report draws, and the SVG files they become.

A file is a pure function of its plot, so that a run that measured nothing new changes none. Its
colors are legible on white and on black, because the background of a reader's page is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK: Final = "#7d8590"
_COLORS: Final = ("#2f81f7", "#e0752d", "#2ea36f", "#a371f7", "#d4577b")
_INCHES: Final = (7.2, 3.4)
_BAR_INCHES: Final = 0.42
_STYLE: Final[Any] = {
    # Text stays text: small, and set in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "counter",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.25,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one bar of each group. *x* holds numbers, or names where there are bars."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    #: The least and the greatest of the rounds at each x, where there were some.
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn, and the file it is drawn to: ``docs/plots/NAME.svg``."""

    name: str
    title: str
    x: str
    #: What *y* is, with its unit.
    y: str
    series: tuple[Series, ...]
    #: "line", or "bars": one for each x, lying, so that long names can be read.
    kind: str = "line"
    log_x: bool = False
    log_y: bool = False


def from_json(body: Mapping[str, Any]) -> Plot:
    """The plot that was stored as *body*."""
    series = tuple(
        Series(each["name"], *(tuple(each[axis]) for axis in ("x", "y", "low", "high")))
        for each in body["series"]
    )
    return Plot(**{**body, "series": series})


def write(plots: Iterable[Plot], folder: Path) -> None:
    """Draw each of *plots* into *folder*; SVG files of no plot are removed.

    Raises ModuleNotFoundError without matplotlib, where there is something to draw.
    """
    drawn = {f"{each.name}.svg": each for each in plots}
    for path in folder.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
    for name, plot in drawn.items():
        folder.mkdir(parents=True, exist_ok=True)
        draw(plot, folder / name)


def draw(plot: Plot, path: Path) -> None:
    """Write *plot* to *path*, in the format of its suffix."""
    # Here and nowhere else: measuring needs no plots, and it takes a second to load.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        bars = plot.kind == "bars"
        height = _BAR_INCHES * len(plot.series[0].x) + 1.0 if bars else _INCHES[1]
        figure = Figure(figsize=(_INCHES[0], height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(plot.title, loc="left")
        (_bars if bars else _lines)(axes, plot)
        if len(plot.series) > 1:
            axes.legend()
        svg = {"metadata": {"Date": None, "Creator": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, **svg)
    if path.suffix == ".svg":
        # As git wants it: no blanks at the ends of lines.
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def _lines(axes: Axes, plot: Plot) -> None:
    for series, color in zip(plot.series, _COLORS, strict=False):
        x = [float(each) for each in series.x]
        axes.plot(x, series.y, marker="o", markersize=4, color=color, label=series.name)
        if series.low:
            axes.fill_between(x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    if plot.log_x:
        axes.set_xscale("log")
        axes.set_xticks(sorted({float(each) for series in plot.series for each in series.x}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_locator(_no_ticks())
    if plot.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(_no_ticks())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))


def _bars(axes: Axes, plot: Plot) -> None:
    names = [str(each) for each in plot.series[0].x]
    thick = 0.8 / len(plot.series)
    for number, (series, color) in enumerate(zip(plot.series, _COLORS, strict=False)):
        at = [place + number * thick for place in range(len(names))]
        made = axes.barh(at, series.y, height=thick * 0.9, color=color, label=series.name)
        axes.bar_label(made, [_short(each) for each in series.y], padding=3, color=_INK)
    middle = thick * (len(plot.series) - 1) / 2
    axes.set_yticks([place + middle for place in range(len(names))], names)
    axes.set(xlabel=plot.y, ylabel=plot.x)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if plot.log_y:
        axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """*value* with as many digits as an axis has room for."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
