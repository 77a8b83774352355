"""The commands that look at counters: watch, top, history and events."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from unittest.mock import patch
from uuid import uuid4

import pytest

from counter_client import Count, CounterClient, Point, Token, UnexpectedAnswerError
from tests.cli.shell import Shell
from tests.support.in_thread import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("at_service")


def test_each_change_is_a_line(shell: Shell, service: Service, name: str) -> None:
    def add_again_and_again() -> None:
        with CounterClient(service.url) as client:
            while not enough.wait(0.05):
                client.add(name, 2)

    enough = Event()
    adding = Thread(target=add_again_and_again)
    adding.start()
    try:
        lines = shell.said("watch", name, "--count", "2").splitlines()
        first, second = shell.documents("watch", name, "--count", "2")
    finally:
        enough.set()
        adding.join()
    assert len(lines) == 2
    when, count, change = lines[1].split()
    assert datetime.fromisoformat(when).tzinfo is not None
    assert 0 < int(change) <= int(count)
    assert first["change"] == 0
    assert second["count"] - first["count"] == second["change"] > 0


def test_a_watch_ends_when_its_time_is_over(shell: Shell) -> None:
    limits: list[tuple[float | None, asyncio.Timeout]] = []
    works = asyncio.timeout

    def limited(seconds: float | None) -> asyncio.Timeout:
        """Time does not pass by itself; the service in this process has limits of its own."""
        if seconds != 60.0:
            return works(seconds)
        limits.append((seconds, works(None)))
        return limits[0][1]

    class Waiting(Elsewhere):
        """Its second count never comes, and the time is over."""

        async def live(self, counter: str) -> AsyncGenerator[Count]:
            yield Count(counter, 1, datetime.now(UTC), "accurate")
            limits[0][1].reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()

    with (
        patch("counter.cli.commands.look.AsyncCounterClient", Waiting),
        patch("counter.cli.commands.look.asyncio.timeout", limited),
    ):
        assert len(shell.documents("watch", "c", "--for", "1m")) == 1
    assert [seconds for seconds, _ in limits] == [60.0]


class Elsewhere:
    """A client that reaches another service."""

    def __init__(self, *_: object, **__: object) -> None: ...

    async def __aenter__(self) -> "Elsewhere":
        return self

    async def __aexit__(self, *_: object) -> None: ...


def test_a_watch_ends_at_a_permanent_error(shell: Shell, name: str) -> None:
    """Regression: it asked again at once, and again, as fast as it could."""
    asked: list[str] = []

    class Wrong(Elsewhere):
        """Its second response is no count."""

        async def live(self, counter: str) -> AsyncGenerator[Count]:
            asked.append(counter)
            assert len(asked) < 3
            yield Count(counter, 1, datetime.now(UTC), "accurate")
            error = UnexpectedAnswerError("a page")
            error.retry = "never"
            raise error

    with patch("counter.cli.commands.look.AsyncCounterClient", Wrong):
        code, _ = shell.run("watch", name)
    assert (code, asked) == (2, [name])
    assert "a page" in shell.err


def test_the_busiest_and_the_highest_come_first(shell: Shell) -> None:
    where = ("--namespace", f"made-{uuid4().hex}")
    shell.said("namespace", "create", where[1], "--counter-type", "ACCURATE")
    assert shell.said("top", *where).startswith("nothing was added")
    for name, adds, each in (("busy", 3, 1), ("high", 1, 99)):
        for _ in range(adds):
            shell.said("add", name, str(each), *where)

    def names(*words: str) -> list[str]:
        return [line.split()[0] for line in shell.said("top", *where, *words).splitlines()]

    wanted = ["COUNTER", "busy", "high", "adds"]

    async def are_seen() -> bool:
        # For a second it is the earlier result.
        return await asyncio.to_thread(names) == wanted

    asyncio.run(eventually(are_seen, "the adds are seen"))
    (found,) = shell.documents("top", *where, "--limit", "1")
    assert [(each["counter"], each["count"]) for each in found["counters"]] == [("busy", 3)]
    assert found["complete"] is True


def test_a_history_is_a_table_csv_and_json(shell: Shell, soon_rolled_up: str, name: str) -> None:
    """A remark says that later adds are not rolled up yet."""
    where = ("--namespace", soon_rolled_up)
    shell.said("add", name, "7", *where)
    wanted = ("history", name, "--from", "1m", "--step", "1h", *where)

    async def is_rolled_up() -> bool:
        points = await asyncio.to_thread(shell.documents, *wanted)
        return any(each["count"] for each in points)

    asyncio.run(eventually(is_rolled_up, "the add is rolled up"))
    points = shell.documents(*wanted)
    assert (points[-1]["count"], sum(each["delta"] for each in points)) == (7, 7)
    csv = shell.said(*wanted, "--csv").splitlines()
    assert csv[0] == "time,count,delta"
    assert csv[-1].endswith(",7,0") or csv[-1].endswith(",7,7")
    head, *rows = shell.said(*wanted).splitlines()
    assert head.split() == ["UP", "TO", "COUNT", "CHANGE"]
    assert rows[-1].split()[-2] == "7"
    assert f"counter: later adds are not rolled up yet; counter get {name} counts them" in shell.err
    assert shell.said("history", name, "--from", "100ms", "--step", "200ms", *where) == ""
    assert f"nothing of {name} is rolled up in that time" in shell.err


def test_a_span_of_time_and_a_prefix_are_summed(shell: Shell, name: str) -> None:
    for more in ("a", "b"):
        shell.said("add", f"{name}{more}", "7")
    since = ("--from", "2026-01-01T00:00:00Z")
    assert shell.said("get", f"{name}a", *since) == "7"
    (found,) = shell.documents("get", f"{name}a", *since)
    assert (found["start"], found["delta"]) == ("2026-01-01T00:00:00.000000Z", 7)
    # How long ago is rounded to the end of a window.
    assert shell.said("get", f"{name}a", "--from", "1h") == "7"
    assert shell.said("get", f"{name}a", "--from", "2h", "--to", "1h") == "0"
    assert shell.said("get", f"{name}a", "--from", "today", "--tz", "Asia/Tokyo") == "7"
    assert shell.said("list", name, "--sum") == "14"
    (summed,) = shell.documents("list", name, "--sum")
    assert (summed["count"], summed["counters"], summed["accuracy"]) == (14, 2, "accurate")
    one = f"{name}a"
    for words in ((one, f"{name}b", *since), (one, "--to", "today"), (one, "--tz", "UTC")):
        shell.fails(2, "get", *words)
        assert "a span of time needs --from, one NAME, and no --max-staleness" in shell.err


def test_steps_without_a_change_are_one_line(shell: Shell) -> None:
    """Regression: one add in an hour was a line among sixty."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    changes = [0, 0, 0, 5, 0, -2, 0, 0, 0]
    points = [
        Point(begin + timedelta(minutes=at), sum(changes[: at + 1]), change)
        for at, change in enumerate(changes)
    ]
    with patch.object(CounterClient, "history", return_value=iter(points)):
        lines = shell.said("history", "c").splitlines()
    assert [line.split(maxsplit=2)[-1].split() for line in lines[1:]] == [
        ["0", "+0"],
        ["steps", "without", "a", "change"],
        ["5", "+5"],
        ["5", "+0"],
        ["3", "-2"],
        ["steps", "without", "a", "change"],
        ["3", "+0"],
    ]
    assert [line[2] for line in lines if line.startswith("…")] == ["2", "2"]
    with patch.object(CounterClient, "history", return_value=iter(points)):
        assert len(shell.documents("history", "c")) == len(points)


def test_an_item_of_an_atomic_add_is_marked_among_events(
    shell: Shell, service: Service, name: str
) -> None:
    shell.said("add", name)
    with CounterClient(service.url) as client:
        client.atomic([(name, 2)], token=Token.new())
    _, item, single = shell.said("events", name).splitlines()
    assert item.split()[2:] == ["+2", item.split()[3], "atomic"]
    assert single.split()[2:] == ["+1", single.split()[3]]


def test_a_refused_add_is_marked_among_events(shell: Shell, name: str) -> None:
    """Regression: token resolve said that +0 was counted."""
    shell.said("add", name, "2")
    shell.fails(5, "add", name, "-3", "--at-least", "0")
    refused, added = shell.said("events", name).splitlines()[1:]
    assert refused.split()[2:] == ["+0", refused.split()[3], "refused", "-3"]
    assert added.split()[2:] == ["+2", added.split()[3]]
    (latest,) = shell.documents("events", name, "--limit", "1")
    assert latest["refused"] == {"delta": -3, "count": 2, "at_least": 0}
    said = shell.fails(5, "token", "resolve", latest["token"], name)
    assert said == (
        "counter: not counted: -3 was refused because of a bound, for ever; the count was 2\n"
    )
    code, out = shell.run("token", "resolve", latest["token"], name, "--json")
    assert (code, '"applied": false' in out) == (5, True)


def test_events_are_shown_latest_first_with_tokens_to_ask_with(shell: Shell, name: str) -> None:
    for words in (["add", name, "5"], ["add", name, "-2"], ["clear", name]):
        shell.said(*words)
    head, *rows = shell.said("events", name).splitlines()
    assert head.split() == ["TIME", "CHANGE", "TOKEN"]
    assert [row.split()[2] for row in rows] == ["clear", "-2", "+5"]
    (latest,) = shell.documents("events", name, "--limit", "1")
    assert latest["clear"] is True
    assert "there are earlier ones" in shell.err
    assert len(shell.documents("events", name, "--limit", "0")) == 3
    assert shell.said("events", name, "--to", "1h") == ""
    token = rows[2].split()[3]
    assert shell.said("token", "resolve", token, name) == f"counted: {name} +5"
    assert shell.documents("token", "resolve", latest["token"], name) == [
        {"applied": True, "counter": name, "clear": True}
    ]
