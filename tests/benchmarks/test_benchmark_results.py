"""Results of the benchmarks: they are read back, and the document shows them."""

from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import SUBJECTS
from benchmarks.results import Figure, Report

REPORT = Report(
    subject="growth-counters",
    title="Growth",
    method="As described.",
    figures=(Figure("adds a second", 0.9, at_least=0.8, rounds=(0.9,)),),
    command="./scripts/bench growth-counters",
)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(results, "DOCUMENT", tmp_path / "benchmarks.md")


@pytest.mark.usefixtures("own_folder")
def test_results_are_read_back() -> None:
    results.store([REPORT], [REPORT.subject])
    assert results.stored() == [REPORT]


@pytest.mark.usefixtures("own_folder")
def test_a_removed_subject_leaves_the_results_at_the_next_run() -> None:
    results.store([REPORT], [REPORT.subject])
    results.store([], ["single-adds"])
    assert results.stored() == []


@pytest.mark.usefixtures("own_folder")
def test_the_document_shows_each_figure_with_its_command() -> None:
    results.store([REPORT], [REPORT.subject])
    results.write_document()
    text = results.DOCUMENT.read_text(encoding="utf-8")
    assert "| adds a second | 0.9 | at least 0.8 | met |" in text
    assert REPORT.command in text


def test_every_result_is_of_a_subject_that_exists() -> None:
    """A figure that no command measures any more is in no document."""
    assert {each.subject for each in results.stored()} <= set(SUBJECTS)


def test_the_document_matches_the_results() -> None:
    assert results.DOCUMENT.read_text(encoding="utf-8") == results.render(results.stored())
