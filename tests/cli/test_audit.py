"""``counter audit`` over a data directory: its output, repairs and exit codes."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from counter.clock import SystemClock
from tests.cli.shell import Shell
from tests.support.filled import DATASET, fill, opened


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("audited") / "data"
    asyncio.run(fill(data))
    return data


@pytest.fixture
def data(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a directory of counters, for a test to damage."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "data"
    copy.mkdir()
    (copy / "counter.db").write_bytes((filled / "counter.db").read_bytes())
    return copy


def damage(data: Path, sql: str) -> None:
    """Change a stored count, as a bug of the service would: with right checksums of the pages."""
    (data / "counter.db-sums").unlink(missing_ok=True)
    with closing(sqlite3.connect(data / "counter.db")) as connection, connection:
        assert connection.execute(sql).rowcount == 1


def audited(shell: Shell, *words: str) -> tuple[int, Any]:
    """The exit code, and the one namespace of the JSON."""
    code, out = shell.run("audit", "--data=data", *words, "--json")
    (found,) = json.loads(out)["namespaces"]
    return code, found


def test_all_is_right(data: Path, shell: Shell) -> None:
    assert shell.said("audit", "--data=data") == "videos: 3 counters audited, 0 wrong"
    assert shell.err == ""


def test_a_wrong_count_is_reported_with_both_numbers(data: Path, shell: Shell) -> None:
    damage(data, "UPDATE counters SET checkpoint = 8 WHERE name = 'a/1'")
    code, text = shell.run("audit", "--data=data")
    assert code == 1
    assert "videos: 3 counters audited, 1 wrong" in text
    assert "'a/1': the count as of " in text
    assert " is 8, its events make 3\n" in text


def test_json_has_the_mismatches(data: Path, shell: Shell) -> None:
    damage(data, "UPDATE recent_windows SET total = 31 WHERE total = 30")
    code, found = audited(shell)
    assert code == 1
    (mismatch,) = found["mismatches"]
    assert (mismatch["counter"], mismatch["repairable"]) == ("a/2", True)
    (finding,) = mismatch["findings"]
    assert finding["damage"] == "wrong_row"
    assert finding["stored"] == {"cleared": False, "total": 31}
    assert finding["expected"] == {"cleared": False, "total": 30}


def test_a_repair_counts_again_and_says_so(data: Path, shell: Shell) -> None:
    """Rows that are wrong or lost, and checkpoints; afterwards all is right."""
    damage(data, "UPDATE counters SET checkpoint = 8 WHERE name = 'a/1'")
    damage(data, "DELETE FROM recent_windows WHERE total = -7")
    code, found = audited(shell, "--audit-log=acts.jsonl", "--repair", "--all")
    assert (code, found["mismatches"], sorted(found["repaired"])) == (3, [], ["a/1", "b"])
    act = json.loads(Path("acts.jsonl").read_text(encoding="utf-8"))
    assert (act["act"], act["end"], sorted(act["counters"])) == (
        "audit.repair",
        "done",
        ["a/1", "b"],
    )
    code, found = audited(shell)
    assert (code, found["mismatches"]) == (0, [])


def test_only_the_selected_counters_are_audited(data: Path, shell: Shell) -> None:
    damage(data, "UPDATE counters SET checkpoint = 8 WHERE name = 'b'")
    for words, code, counters in (
        (["--prefix=a/"], 0, 2),
        (["--namespace=videos", "--counter=a/1"], 0, 1),
        (["--namespace=videos", "--counter=b", "--counter=a/1"], 1, 2),
        (["--sample=2", "--prefix=a/", "--rate=0/s"], 0, 2),
        (["--all", "--last=24h"], 1, 3),
    ):
        ended, found = audited(shell, *words)
        assert (ended, found["counters"]) == (code, counters), words


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--counter=a"], "give the one --namespace"),
        (["--namespace=missing"], "there is no namespace 'missing'"),
        (["--namespace=likes"], "'likes' is BEST_EFFORT"),
        (["--sample=0"], "--sample is 0"),
        (["--rate=fast"], "fast"),
        (["--last=long"], "long"),
    ],
)
def test_impossible_requests_are_refused(
    words: list[str], hint: str, data: Path, shell: Shell
) -> None:
    assert hint in shell.fails(2, "audit", "--data=data", *words)


def test_a_directory_without_counters_stays_as_it_is(tmp_path: Path, shell: Shell) -> None:
    assert "holds no counters" in shell.fails(2, "audit", f"--data={tmp_path / 'typo'}")
    assert not (tmp_path / "typo").exists()


def test_during_service_an_audit_is_refused_with_advice(data: Path, shell: Shell) -> None:
    async def beside() -> str:
        async with opened(data):
            return await asyncio.to_thread(shell.fails, 2, "audit", "--data=data")

    text = asyncio.run(beside())
    assert "is held by process" in text
    assert "counter backup" in text


def test_a_directory_that_was_not_served_for_longer_than_retention_can_be_repaired(
    data: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first repair moves the watermark to a time without slices."""

    class Later(SystemClock):
        def wall_us(self) -> int:
            return super().wall_us() + 5 * DATASET.retention_us

    monkeypatch.setattr("counter.storage.sqlite.SqliteKind.clock", lambda _kind: Later())
    flags = ["--repair", "--trust-settled", "--all"]
    for name in ("a/1", "b"):
        damage(data, f"UPDATE counters SET checkpoint = 8 WHERE name = '{name}'")
        code, found = audited(shell, *flags)
        assert (code, found["mismatches"], found["repaired"]) == (3, [], [name])
    assert audited(shell, *flags)[0] == 0


def test_a_database_with_a_flipped_bit_is_not_audited(data: Path, shell: Shell) -> None:
    """An event with a flipped bit is another event: the counts would agree with it."""
    shell.said("audit", "--all", "--data=data")
    database, at = data / "counter.db", 5 * 4_096 - 10
    whole = database.read_bytes()
    database.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "counter.db is damaged: what is in page 5 is not what was" in shell.fails(
        2, "audit", "--all", "--data=data"
    )
    database.write_bytes(whole)
    shell.said("audit", "--all", "--data=data")
