"""Pages of a real browser, as a test visits them: whatever goes wrong on one fails it."""

import re
from collections.abc import Callable, Collection
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.support.server import ROOT

ARTEFACTS = ROOT / "artefacts" / "console"
#: Chromium's own messages about a problem.
_ANSWERED = re.compile(r"Failed to load resource: the server responded with a status of (\d{3})")

#: Each violated rule, its impact, and its elements.
_FINDINGS = """axe.run(document, {resultTypes: ["violations"]}).then(
    (found) => found.violations.map(
    (each) => [each.id, each.impact, ...each.nodes.map((node) => node.html.slice(0, 200))]))"""


class Visit:
    """One page, and its errors."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        #: Statuses of problems that the test means to meet.
        self.meant: set[int] = set()
        #: Whether the test cut the page off.
        self.is_down = False
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def _hear(self, kind: str, text: str) -> None:
        if self.is_down and "net::ERR_" in text:
            return
        if kind in ("error", "warning"):
            answered = _ANSWERED.match(text)
            if answered is None or int(answered[1]) not in self.meant:
                self.errors.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.errors.append(f"it asked another host: {url}")

    def go(self, place: str = "") -> Page:
        """The page at ``#/place``."""
        self.page.goto(f"{self.url}/console#/{place}")
        return self.page

    def cut_off(self, is_down: bool) -> None:
        """Have no request of the page arrive any more; or have them arrive again."""
        self.is_down = self.is_down or is_down
        self.page.context.set_offline(is_down)

    def shot(self, name: str, *, whole: bool = True) -> None:
        """Keep a picture, of the *whole* page or of its window."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=whole)

    def check_access(self, beside: Collection[str] = ()) -> None:
        """No finding of axe's, of any weight, but by the rules *beside*."""
        if self.page.evaluate("typeof axe") == "undefined":
            self.page.evaluate(Axe().axe_script)
        found = [each for each in self.page.evaluate(_FINDINGS) if each[0] not in beside]
        assert not found, found


#: Opens a page of the service at an address, in a context of its own.
Visits = Callable[..., Any]
