"""The programs in docs/explanation print the output in their comments."""

from pathlib import Path

import pytest

from tests.client.test_documents import program_of, run_as_printed

IDEMPOTENCY = "docs/explanation/idempotency.md"


@pytest.mark.usefixtures("child_processes")
async def test_the_classic_failures_and_the_same_stories_here_end_as_printed(
    tmp_path: Path,
) -> None:
    await run_as_printed(program_of(IDEMPOTENCY), tmp_path)
