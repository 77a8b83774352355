"""The level of a test follows from its fixtures, and a test of the level alone is alone."""

import os
import socket
import subprocess
import sys
import threading
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.levels import Level, imports_of, is_touched, level_of


def item(*fixtures: str, **params: str) -> Any:
    return SimpleNamespace(fixturenames=fixtures, callspec=SimpleNamespace(params=params))


@pytest.mark.parametrize(
    ("item", "level"),
    [
        (item("tmp_path"), Level.ALONE),
        (item("storage", storage="sqlite"), Level.ALONE),
        (item("storage", storage="postgresql"), Level.SERVED),
        (item("postgresql", "child_processes"), Level.SERVED),
        (item("three_nodes", "minutes", "child_processes"), Level.LONG),
    ],
)
def test_the_level_follows_from_the_fixtures(item: Any, level: Level) -> None:
    assert level_of(item) is level


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-V"], check=True),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: os.fork() or os._exit(0),
        lambda: get_context("spawn").Process(target=print).start(),
    ],
    ids=["subprocess", "system", "spawn", "fork", "multiprocessing"],
)
def test_a_test_that_starts_a_process_without_the_fixture_fails(start: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process.*child_processes"):
        start()


@pytest.mark.usefixtures("child_processes")
def test_with_the_fixture_it_may() -> None:
    subprocess.run([sys.executable, "-V"], check=True, capture_output=True)


def test_a_test_that_connects_to_a_server_of_another_process_fails() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # As another process would: not by the method that notes which servers are this one's.
        super(socket.socket, listener).listen()
        with pytest.raises(pytest.fail.Exception, match="connects to a server"):
            socket.create_connection(listener.getsockname())


def test_a_server_of_its_own_may_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname()).close()


def test_a_port_that_nothing_listens_on_may_be_tried() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 9))


def test_threads_are_no_processes() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def test_imports_of_a_module_are_known() -> None:
    found = imports_of("tests/crash/test_power_loss.py")
    assert "counter/storage/sqlite" in found
    assert "counter/types.py" in found


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("tests/crash/test_power_loss.py", True),
        ("counter/storage/sqlite/events.py", True),
        ("counter/storage/redis/cache.py", False),
        ("docs/index.md", False),
    ],
)
def test_a_change_of_an_import_touches_a_test(changed: str, touched: bool) -> None:
    assert is_touched("tests/crash/test_power_loss.py", [changed]) is touched


def test_a_test_of_pages_is_touched_by_the_pages() -> None:
    assert is_touched("tests/browser/test_console.py", ["api/console/static/console.js"])
    assert not is_touched("tests/browser/test_console.py", ["counter/core/write.py"])
