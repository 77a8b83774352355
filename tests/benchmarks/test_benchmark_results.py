"""Results of the benchmarks: they are read back, and the document shows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import document, results
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
def test_the_pages_show_each_figure_with_its_command(tmp_path: Path) -> None:
    missed = replace(REPORT.figures[0], what="gets a second", value=0.5, rounds=(0.5,))
    gone = tmp_path / "benchmarks" / "gone.md"
    gone.parent.mkdir()
    gone.touch()
    results.store([replace(REPORT, figures=(*REPORT.figures, missed))], [REPORT.subject])
    document.write_document(tmp_path)
    page = (tmp_path / "benchmarks" / "growth-counters.md").read_text(encoding="utf-8")
    assert "| adds a second | 0.9 | at least 0.8 | met |" in page
    assert REPORT.command in page
    front = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "| gets a second ([growth-counters](benchmarks/growth-counters.md)) | 0.5 |" in front
    assert "| [Growth](benchmarks/growth-counters.md) |  | 1 of 2 |" in front
    assert not gone.exists()


def test_every_result_is_of_a_subject_that_exists() -> None:
    """A figure that no command measures any more is in no document."""
    assert {each.subject for each in results.stored()} <= set(SUBJECTS)


def test_the_pages_match_the_results() -> None:
    for name, text in document.pages(results.stored()).items():
        assert (document.DOCS / name).read_text(encoding="utf-8") == text
