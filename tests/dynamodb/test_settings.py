"""The settings of DynamoDB: what is documented, and what is refused."""

from pathlib import Path

import pytest

from counter.storage.dynamodb import DynamodbKind
from tests.support.settings import check_document, refusal


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without a file of settings."""
    monkeypatch.chdir(tmp_path)


def test_the_document_has_each_setting_with_its_default_and_bounds() -> None:
    check_document(DynamodbKind(), "DynamoDB")


def test_units_are_given_for_reads_and_writes() -> None:
    assert "give both or neither" in refusal(store="dynamodb", dynamodb_read_units=5)


def test_clocks_are_compared_in_whole_seconds() -> None:
    assert "give 1s or more" in refusal(store="dynamodb", clock_skew_max="500ms")
    own = {"datasets": {"other": {"clock_skew_max": "999ms"}}}
    assert "dataset 'other' is 999ms" in refusal(store="dynamodb", **own)
