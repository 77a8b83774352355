"""Plots of the benchmarks: what is stored comes back, and the same figures make the same file."""

import json
from pathlib import Path

import pytest

from benchmarks import plots, results
from benchmarks.plots import Plot, Series
from benchmarks.results import Figure, Report

LINE = Plot(
    name="adds-by-counters",
    title="Adds a second against counters",
    x="counters",
    y="adds a second",
    series=(Series("even", (1e3, 1e6), (12_000.0, 9_000.0), (11_000.0, 8_000.0), (13e3, 9_500.0)),),
    log_x=True,
)
BARS = Plot(
    name="peers",
    title="Requests a second",
    x="",
    y="requests a second",
    series=(Series("by the clock", ("the service", "another"), (21_000.0, 5_800.0)),),
    kind="bars",
)
REPORT = Report(
    subject="growth-counters",
    title="Growth",
    method="As told.",
    figures=(Figure("adds a second", 0.9, at_least=0.8, rounds=(0.9,)),),
    plots=(LINE, BARS),
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(results, "DOCUMENT", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(results, "PLOTS", tmp_path / "docs" / "plots")


def test_what_is_stored_comes_back() -> None:
    """A report with plots is read as it was written."""
    results.store([REPORT], [REPORT.subject])
    assert results.stored() == [REPORT]


def test_reports_from_before_there_were_plots_still_load() -> None:
    """Figures that were stored without plots have none."""
    results.store([REPORT], [REPORT.subject])
    body = json.loads(results.RESULTS.read_text(encoding="utf-8"))
    del body[0]["plots"]
    results.RESULTS.write_text(json.dumps(body), encoding="utf-8")
    assert [each.plots for each in results.stored()] == [()]


@pytest.mark.usefixtures("child_processes")
def test_the_document_shows_each_plot() -> None:
    """Every file that the document embeds is there, with the text that it says."""
    results.store([REPORT], [REPORT.subject])
    results.write_document()
    text = results.DOCUMENT.read_text(encoding="utf-8")
    for plot in REPORT.plots:
        assert f"![{plot.title}](plots/{plot.name}.svg)" in text
        drawn = (results.PLOTS / f"{plot.name}.svg").read_text(encoding="utf-8")
        assert plot.title in drawn


@pytest.mark.usefixtures("child_processes")
def test_the_same_figures_make_the_same_file(tmp_path: Path) -> None:
    """A run that measured nothing new changes no file: neither time nor chance is in it."""
    for folder in ("first", "second"):
        plots.write([LINE, BARS], tmp_path / folder)
    for plot in (LINE, BARS):
        first, second = (tmp_path / each / f"{plot.name}.svg" for each in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.usefixtures("child_processes")
def test_a_plot_that_is_no_longer_drawn_is_deleted(tmp_path: Path) -> None:
    """What was drawn once and is in no report is no part of the document."""
    plots.write([LINE, BARS], tmp_path)
    plots.write([BARS], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["peers.svg"]
