"""docs/explanation is true: programs print what stands behind them, figures were measured."""

from pathlib import Path

import pytest

from benchmarks import comparison, results
from tests.client.test_documents import program_of, run_as_printed
from tests.test_readme import read

IDEMPOTENCY = "docs/explanation/idempotency.md"


@pytest.mark.usefixtures("child_processes")
async def test_the_classic_failures_and_the_same_stories_here_end_as_printed(
    tmp_path: Path,
) -> None:
    await run_as_printed(program_of(IDEMPOTENCY), tmp_path)


def test_what_the_comparison_quotes_was_measured(tmp_path: Path) -> None:
    page = tmp_path / comparison.PAGE.name
    page.write_text(read(comparison.PAGE), encoding="utf-8")
    comparison.write(results.stored(), page)
    assert page.read_text(encoding="utf-8") == read(comparison.PAGE)
