"""A real Chromium, and services for it to show."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from counter.api_keys import Scope
from counter.storage.sqlite import SqliteKeys
from scripts.service_process import free_ports
from tests.browser.visits import Visit, Visits
from tests.support.keys import made
from tests.support.needs import miss
from tests.support.server import Server

PHONE: ViewportSize = {"width": 375, "height": 800}
DESK: ViewportSize = {"width": 1200, "height": 850}
#: A name that is this machine to the browser, as a foreign page's may become at any time.
FOREIGN = "evil.example"


@pytest.fixture(scope="module")
def debugging_port() -> int:
    """A second way to drive the browser."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def chromium(debugging_port: int, child_processes: None) -> Iterator[Browser]:
    """Debian's, or the one that CHROMIUM names."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        miss("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # In a container, as root, its sandbox cannot be; it shows this service's pages alone.
        flags = ["--no-sandbox", f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1"]
        flags.append(f"--remote-debugging-port={debugging_port}")
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        expect.set_options(timeout=60_000)
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


#: Notes what a page asks for, how many responses it waits for, and the streams that it has not
#: ended.
_NOTE = """
window.asked = [];
window.awaited = 0;
const [sent, streams] = [window.fetch, []];
window.fetch = async (url, options) => {
  asked.push(url);
  if (url.endsWith("/live")) {
    streams.push(options.signal);
    return sent(url, options);
  }
  awaited += 1;
  try {
    const answer = await sent(url, options);
    await answer.clone().text();
    return answer;
  } finally {
    awaited -= 1;
  }
};
window.openStreams = () => streams.filter((signal) => !signal.aborted).length;
"""


@pytest.fixture
def tab(chromium: Browser, debugging_port: int) -> Iterator[Page]:
    """A tab that is hidden while another one is in front: Playwright's own are always visible.

    ``asked`` has the URLs that the page asked for, and ``awaited`` is how many were not answered.
    """
    address = f"http://127.0.0.1:{debugging_port}"
    browser = chromium.browser_type.connect_over_cdp(address, no_defaults=True)
    page = browser.contexts[0].new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(_NOTE)
    page.clock.install()
    try:
        yield page
        assert errors == []
    finally:
        page.close()
        browser.close()


@contextmanager
def served(home: Path, *scopes: Scope, **more: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a service, and a key of each of *scopes*, which it asks for if there are."""
    flags = {"accept_limit": "5s", "rollup_window": "1s", **more}
    server = Server(home / "data", home / "logs", flags)

    async def start() -> list[str]:
        keys = [await new_key(server.data, scope) for scope in scopes]
        await server.start()
        return keys

    try:
        # Not here: the browser's driver runs a loop in this thread.
        with ThreadPoolExecutor(1) as other:
            keys = other.submit(lambda: asyncio.run(start())).result()
        yield server.url, keys
    finally:
        server.clean_up()


def client_of(service: str) -> httpx.Client:
    """A client beside the page: the machine may be busy with a browser."""
    url = f"{service}/v1/namespaces"
    return httpx.Client(base_url=url, timeout=100, trust_env=False, verify=False)


async def new_key(data: Path, scope: Scope) -> str:
    """The text of a key in the data directory of a service that is not started yet."""
    key, header = made(scope, "*" if scope is Scope.ADMIN else "lab*")
    assert await SqliteKeys(data).create_api_key(key)
    return header["Authorization"].removeprefix("Bearer ")


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
    with served(tmp_path_factory.mktemp("guarded"), Scope.ADMIN, Scope.WRITE) as found:
        yield found
