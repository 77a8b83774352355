"""A real Chromium, and services for it to show."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

from tests.browser.visits import Visit, Visits
from tests.support.needs import miss
from tests.support.server import Server

PHONE: ViewportSize = {"width": 390, "height": 800}
DESK: ViewportSize = {"width": 1200, "height": 850}
#: A name that is this machine to the browser, as a foreign page's may become at any time.
FOREIGN = "evil.example"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's, or the one that CHROMIUM names."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        miss("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # In a container, as root, its sandbox cannot be; it shows this service's pages alone.
        resolves = f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1"
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", resolves])
        expect.set_options(timeout=20_000)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Browser) -> Visits:
    """Opens pages of a service: ``with visit(url, phone=True) as page``."""

    @contextmanager
    def open_page(
        url: str, *, phone: bool = False, dark: bool = False, **more: Any
    ) -> Iterator[Visit]:
        context = chromium.new_context(
            viewport=PHONE if phone else DESK,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **more,
        )
        try:
            visited = Visit(context.new_page(), url)
            yield visited
            assert visited.errors == []
        finally:
            context.close()

    return open_page


@contextmanager
def served(home: Path, *scopes: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a service, and a key of each of *scopes*, which it asks for if there are."""
    flags = {"accept_limit": "5s", "rollup_window": "1s"}
    server = Server(home / "data", home / "logs", flags)
    keys = [new_key(server.data, scope) for scope in scopes]
    try:
        # Not here: the browser's driver runs a loop in this thread.
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: asyncio.run(server.start())).result()
        yield server.url, keys
    finally:
        server.clean_up()


def new_key(data: Path, scope: str) -> str:
    """As an operator makes it."""
    namespaces = "*" if scope == "admin" else "lab*"
    command = [sys.executable, "-m", "counter", "key", "create", "--data", str(data)]
    command += ["--namespace", namespaces, "--scope", scope]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[str]:
    """A service that asks for no key."""
    with served(tmp_path_factory.mktemp("open")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, chromium: Browser
) -> Iterator[tuple[str, list[str]]]:
    """A service that asks for a key; an admin's for everything, and a writer's for the lab."""
    with served(tmp_path_factory.mktemp("guarded"), "admin", "write") as found:
        yield found
