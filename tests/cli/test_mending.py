"""``counter doctor``, ``recount`` and ``completion``."""

import asyncio
import json
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from counter.limits import SECOND
from counter_client import CounterClient, Options
from counter_client.errors import CounterError
from tests.cli.shell import Shell
from tests.support.in_thread import Service, in_thread
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with in_thread(tmp_path_factory.mktemp("service") / "data", accept_limit="3s") as server:
        yield server


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which nothing is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COUNTER_URL", raising=False)
    monkeypatch.delenv("COUNTER_API_KEY", raising=False)


def doctor(shell: Shell, *flags: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the worst that is said of each part."""
    code, out = shell.run("doctor", "--json", *flags)
    found: dict[str, str] = {}
    document = json.loads(out)
    for each in document["checks"]:
        # Each finding that is not ok comes with the fix.
        assert (each["state"] == "ok") == (each["do"] == ""), each
        if found.get(each["part"], "ok") == "ok":
            found[each["part"]] = each["state"]
    assert (code == 1) == (document["wrong"] > 0)
    return code, found


def test_before_the_first_start_all_is_right_and_stays_as_it_is(shell: Shell) -> None:
    code, found = doctor(shell)
    assert code == 0
    assert set(found.values()) == {"ok"}
    assert list(Path().iterdir()) == []
    assert shell.said("doctor").endswith("nothing is wrong")


def test_beside_a_service_it_looks_at_both_and_touches_neither(
    service: Service, shell: Shell
) -> None:
    before = {each.name for each in service.data.iterdir()}
    where = ("--data", str(service.data), "--url", service.url)
    assert f"{service.data} has schema version" in shell.said("doctor", *where)
    code, found = doctor(shell, *where)
    assert code == 0
    assert set(found.values()) == {"ok"}
    assert {"clock", "store", "cache", "service"} <= set(found)
    assert {each.name for each in service.data.iterdir()} == before
    with CounterClient(service.url, options=Options(trust_env=False)) as client:
        assert list(client.counters()) == []


def test_a_service_on_this_machine_is_looked_at_without_a_proxy(
    service: Service, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was asked by the proxy of the environment, and said not to answer."""
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    _, found = doctor(shell, "--url", service.url)
    assert found["service"] == "ok"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--retention", "1m"], "settings"),
        (["--url", "http://127.0.0.1:9"], "service"),
        (["--url", "nowhere"], "service"),
        (["--data", "a-file"], "store"),
        (["--data", "damaged"], "store"),
        (["--data", "newer"], "store"),
        (["--data", "of-tomorrow"], "clock"),
        (["--cache", "memcached://127.0.0.1:1"], "cache"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_faults_are_found(flags: list[str], part: str, shell: Shell) -> None:
    Path("a-file").touch()
    Path("damaged").mkdir()
    Path("damaged/counter.db").write_bytes(b"x" * 200)
    Path("newer").mkdir()
    with closing(sqlite3.connect("newer/counter.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    Path("of-tomorrow").mkdir()
    tomorrow_us = int(datetime.now(UTC).timestamp() + 86_400) * SECOND
    with closing(sqlite3.connect("of-tomorrow/counter.db")) as ahead:
        ahead.executescript(
            "CREATE TABLE watermarks (through); CREATE TABLE datasets (dropped_before);"
            " CREATE TABLE slices (start); CREATE TABLE tokens (time);"
            f" INSERT INTO tokens VALUES ({tomorrow_us})"
        )
    code, found = doctor(shell, *flags)
    assert (code, found[part]) == (1, "wrong")


async def test_a_recount_is_of_the_windows_that_are_rolled_up(
    service: Service, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTER_URL", service.url)
    assert shell.documents("recount", "never") == [{"counter": "never", "windows": 0}]
    with CounterClient(service.url, options=Options(trust_env=False)) as client:
        client.add("seen", 7)

        await eventually(
            lambda: any(point.count == 7 for point in client.history("seen")), "it is rolled up"
        )
    assert shell.documents("recount", "seen") == [{"counter": "seen", "windows": 1}]
    shell.fails(1, "recount", "seen", "--namespace", "nowhere")


@pytest.mark.usefixtures("child_processes")
def test_a_bash_completes_commands_and_flags(shell: Shell, tmp_path: Path) -> None:
    shell.fails(2, "completion", "tcsh")
    (tmp_path / "counter").write_text(shell.said("completion", "bash"))
    asked = "; ".join(
        f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; COMPREPLY=(); _counter;"
        ' echo "${COMPREPLY[*]}"'
        for words in ("counter exp", "counter key cr", "counter export x --pre")
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source ./counter; complete -p counter; {asked}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    how, *completed = done.stdout.splitlines()
    assert "-F _counter" in how
    assert [each.strip() for each in completed] == ["export", "create", "--prefix"]


def test_a_service_that_requires_keys_is_asked_without_one(service: Service, shell: Shell) -> None:
    """The last one here: from the first key on every request needs one."""
    place = ["--data", str(service.data)]
    shell.said("key", "create", "--namespace", "*", "--scope", "read", *place)
    with CounterClient(service.url, options=Options(trust_env=False)) as client:

        async def is_closed() -> bool:
            with suppress(CounterError):
                return not client.namespaces()
            return True

        asyncio.run(eventually(is_closed, "the service has reloaded the keys"))
    code, found = doctor(shell, *place, "--url", service.url)
    assert (code, found["service"]) == (0, "ok")
