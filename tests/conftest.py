"""Fixtures every test may use, and the profiles of the property tests."""

import gc
import logging
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from counter.config.store_kinds import store_names
from tests.support.app import App, forget_applications, running
from tests.support.cluster import (
    any_cache,
    breakable,
    breakable_cache,
    breakable_memcached,
    breakable_redis,
    cassandra,
    cassandra_with_passwords,
    memcached,
    redis,
    schedule,
    three_nodes,
)
from tests.support.levels import Levels, add_options, child_processes, minutes
from tests.support.needs import in_ci
from tests.support.peak_memory import PeakMemory
from tests.support.rest import Rest
from tests.support.store_folders import STORE_FOLDERS
from tests.support.virtual import no_deadline_by_the_wall

__all__ = [
    "any_cache",
    "breakable",
    "breakable_cache",
    "breakable_memcached",
    "breakable_redis",
    "cassandra",
    "cassandra_with_passwords",
    "child_processes",
    "memcached",
    "minutes",
    "redis",
    "three_nodes",
]

#: The modules with the fixtures of the stores that are installed.
_OF_STORES = [
    name for each in store_names() if find_spec(name := f"tests.support.{each}") is not None
]
# Now, because the conftest of a store's folder imports one before pytest_configure is called.
pytest.register_assert_rewrite(*_OF_STORES)

_SLOW_MACHINES = (HealthCheck.too_slow,)

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINES
)
# The gate tries the same examples each time, so that it fails for what was changed.
settings.register_profile(
    "gate", parent=settings.get_profile("default"), max_examples=90, derandomize=True, database=None
)
# A first look: scripts/test without arguments.
settings.register_profile("few", parent=settings.get_profile("gate"), max_examples=20)
# scripts/long tries many, and others each time.
settings.register_profile(
    "deep",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    derandomize=False,
    database=None,
)
settings.load_profile("gate" if in_ci() else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts jobs in the background so, and what tests start would ignore it as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _OF_STORES:
        config.pluginmanager.import_plugin(name)
    config.pluginmanager.register(PeakMemory())
    config.pluginmanager.register(Levels(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    schedule(config, items)
    # Their fixtures, which have the names of stores, do not exist.
    missing = STORE_FOLDERS.keys() - {*store_names()}
    for item in items:
        if not missing.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip("its store is not installed"))


@pytest.fixture(scope="session", autouse=True)
def no_context_is_used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The contexts of the user who runs the tests are none of theirs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


def pytest_collection_finish() -> None:
    # Thousands of tests, and all modules: else each full collection of garbage goes through them.
    # A run within a test keeps what that test has made out of it.
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def loggers_have_no_level() -> None:
    """Whatever an earlier test, or a service in a thread of this process, set."""
    logging.getLogger("counter").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_application_is_kept() -> Iterator[None]:
    """After each test, whichever way it made its applications."""
    yield
    forget_applications()


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """A directory in memory if the machine has one: a commit there waits for no disk."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="counter-test-", dir=parent))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["sqlite", "memory"])
def storage(request: pytest.FixtureRequest) -> str:
    """The store behind the API; the rest takes part in tests that are marked ``every_store``."""
    if request.param in ("postgresql", "dynamodb"):
        request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture
async def app(storage: str, fast_dir: Path) -> AsyncIterator[App]:
    """The service in this process, its clock and its rollup in the test's hand."""
    with no_deadline_by_the_wall():
        async with running(storage, fast_dir) as each:
            yield each


@pytest.fixture
def rest(app: App) -> Rest:
    """The namespace ``default``: ACCURATE, windows of 10 s, accept limit 5 s."""
    return app.rest
