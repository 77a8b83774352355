"""A foreign page in a real browser beside a service without keys, and the document's page."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import FOREIGN
from tests.browser.visits import Visits

#: Posts without a body and without a content type, which needs no leave of the other side.
ASK = "(url) => fetch(url, {method: 'POST', mode: 'no-cors'}).then(() => null)"


class Blank(BaseHTTPRequestHandler):
    """An empty page, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def foreign_page() -> Iterator[str]:
    """The address of a page under a foreign name."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{FOREIGN}:{server.server_port}/"
        server.shutdown()


def test_a_foreign_page_can_neither_write_nor_read(
    chromium: Browser, service: str, foreign_page: str
) -> None:
    context = chromium.new_context()
    try:
        page = context.new_page()
        page.goto(foreign_page)
        for path in ("/v1/tokens", "/v1/namespaces/default/counters/c/recount"):
            with page.expect_response(f"{service}{path}") as answered:
                page.evaluate(ASK, f"{service}{path}")
            assert answered.value.status == 403
        # Its name may resolve to this machine at any time: to the browser it is the same origin.
        answer = page.goto(f"http://{FOREIGN}:{urlsplit(service).port}/v1/namespaces")
        assert answer is not None
        assert answer.status == 403
    finally:
        context.close()


def test_the_api_can_be_tried_with_a_key(visit: Visits, guarded: tuple[str, list[str]]) -> None:
    """On the page of the OpenAPI document: its policy lets the page send requests with the key."""
    url, (admin, _) = guarded
    with visit(url) as page_visit:
        page = page_visit.page
        page.goto(f"{url}/docs")
        page.get_by_role("button", name="Authorize").first.click()
        page.locator(".auth-container input").fill(admin)
        page.locator(".auth-container").get_by_role("button", name="Apply credentials").click()
        page.get_by_role("button", name="Close").click()
        page.locator("#operations-namespaces-listNamespaces .opblock-summary-control").click()
        page.get_by_role("button", name="Try it out").click()
        with page.expect_response(f"{url}/v1/namespaces") as answered:
            page.get_by_role("button", name="Execute").click()
        assert answered.value.status == 200
