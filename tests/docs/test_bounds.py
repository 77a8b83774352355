"""The programs of the pages on bounds run for real: answers are lost, and orders sent again."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.cluster_servers import redis_missing, redis_server
from scripts.service_process import free_ports
from tests.support.child import run_python
from tests.support.documents import page
from tests.support.needs import miss
from tests.support.server import ROOT, served
from tests.support.servers import postgresql_server

#: A name, and numbers.
_ROW = re.compile(r"^(\S.*?) {2,}(-?\d+) +(-?\d+) +(-?\d+) +(-?\d+)$", re.MULTILINE)
_PYTHON_PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"}

Rows = dict[str, tuple[int, ...]]


def rows_of(text: str) -> Rows:
    return {name: tuple(map(int, numbers)) for name, *numbers in _ROW.findall(text)}


@pytest.fixture
def servers(tmp_path: Path, child_processes: None) -> Iterator[list[str]]:
    """The flags that name them."""
    if problem := redis_missing():
        miss(problem)
    [port] = free_ports(1)
    redis = redis_server("redis", tmp_path / "redis", "127.0.0.1", port)
    with ExitStack() as stack:
        redis.start()
        stack.callback(redis.stop)
        database = stack.enter_context(postgresql_server())
        service = stack.enter_context(served(tmp_path))
        yield [
            *("--url", service.url, "--redis", f"redis://127.0.0.1:{port}"),
            *("--postgresql", database.dsn()),
        ]


def run(program: str, *flags: str) -> Rows:
    """Run a program of docs/programs; what it printed for each way."""
    done = run_python(f"docs/programs/{program}.py", *flags, env=_PYTHON_PATH, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return rows_of(done.stdout)


@pytest.mark.slow
def test_only_a_token_keeps_the_bound_and_the_count(servers: list[str]) -> None:
    """The page has a run of the program: its numbers hold as far as they are no chance."""
    found, written = run("sell_at_most", *servers), rows_of(page("how-to/sell-at-most.md"))
    assert [*found] == [*written]
    for rows in (found, written):
        counter, _, script, sql = rows.values()
        assert all(lost > 0 for lost, *_ in rows.values())
        assert counter[1:] == (100, 0, 0)
        assert script[1:] == (100 - script[3], 0, script[3])
        assert sql[1:] == (100 - sql[3], 0, sql[3])
        assert min(script[3], sql[3]) > 0


def test_a_wrong_row_is_found() -> None:
    assert rows_of("a b         1   2   -3  4\nhead   x  y\n") == {"a b": (1, 2, -3, 4)}
