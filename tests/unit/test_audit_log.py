"""The audit log keeps finished acts with their actors, and nothing else."""

import asyncio
import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counter.clock import to_rfc3339
from counter.config.settings import Settings
from counter.errors import InvalidBodyError, RefusedError, StartupError, StoreUnavailableError
from counter.security.audit_log import Act, AdminLog, Who, os_user
from counter.testing.clock import FakeClock
from tests.support.times import START_US

WHO = Who("key:abc", "10.0.0.7:5123", "req-1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def log(path: Path) -> AdminLog:
    return AdminLog(path, FakeClock(START_US))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_an_act_is_in_the_file_and_in_the_log(
    log: AdminLog, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings().default_namespace()
    with caplog.at_level(logging.INFO, "counter.audit"):
        async with log.act("namespace.change", WHO, namespace="videos") as act:
            act.changed(settings, replace(settings, accept_limit_us=7_000_000))
    [line] = lines(path)
    assert line == {
        "time": to_rfc3339(START_US),
        "act": "namespace.change",
        "end": "done",
        "who": "key:abc",
        "remote": "10.0.0.7:5123",
        "request_id": "req-1",
        "namespace": "videos",
        "before": {"accept_limit": "5s"},
        "after": {"accept_limit": "7s"},
    }
    [record] = caplog.records
    fields = record.__dict__["fields"]
    assert (record.getMessage(), fields["who"]) == ("namespace.change done", "key:abc")


@pytest.mark.parametrize("refused", [InvalidBodyError("shards is 0"), RefusedError("no rights")])
async def test_a_refused_act_changed_nothing_and_is_not_reported(
    log: AdminLog, path: Path, refused: Exception
) -> None:
    with pytest.raises(type(refused)):
        async with log.act("namespace.create", WHO, namespace="videos"):
            raise refused
    assert lines(path) == []


@pytest.mark.parametrize("end", [
    StoreUnavailableError("no answer"), asyncio.CancelledError(), RuntimeError("a bug"),
], ids=["unavailable", "cancelled", "bug"])  # fmt: skip
async def test_an_act_with_an_unknown_result_is_logged_as_that(
    log: AdminLog, path: Path, end: BaseException
) -> None:
    with pytest.raises(type(end)):
        async with log.act("namespace.delete", WHO, namespace="videos"):
            raise end
    assert [(each["act"], each["end"]) for each in lines(path)] == [("namespace.delete", "unknown")]


def test_only_its_user_may_read_the_file(log: AdminLog, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_a_crash_cut_short_spoils_no_other(log: AdminLog, path: Path) -> None:
    path.write_bytes(b'{"act":"key.cre')
    log.record("schema.apply", WHO, Act({}))
    cut, whole = path.read_bytes().splitlines()
    assert (cut, json.loads(whole)["act"]) == (b'{"act":"key.cre', "schema.apply")


def test_a_file_that_was_moved_away_is_made_again(log: AdminLog, path: Path) -> None:
    log.record("schema.apply", WHO, Act({}))
    path.rename(path.with_suffix(".1"))
    log.record("backup.restore", WHO, Act({}))
    assert [each["act"] for each in lines(path)] == ["backup.restore"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_each_entry_is_one_line(log: AdminLog, path: Path) -> None:
    log.record("key.create", WHO, Act({"label": 'a\n{"act":"forged"}\u2028'}))
    [line] = path.read_bytes().splitlines()
    assert json.loads(line)["label"] == 'a\n{"act":"forged"}\u2028'


def test_a_file_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"audit_log '.*' cannot be written: .*; let the user"):
        AdminLog(tmp_path / "missing" / "audit.jsonl", FakeClock(START_US))


def test_a_file_that_fails_later_is_reported_and_the_act_stays(
    log: AdminLog, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.INFO, "counter.audit"):
        log.record("schema.apply", WHO, Act({}))
    levels = [each.levelno for each in caplog.records]
    assert levels == [logging.INFO, logging.ERROR]


def test_acts_of_the_command_line_are_the_users_that_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("SUDO_USER", "alice")
    who = os_user()
    assert (who.sudo_user, who.remote) == ("alice", None)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert os_user().who == "user:987654"
