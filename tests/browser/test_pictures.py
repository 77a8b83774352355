"""The pictures of the documentation: the console over a service that looks like one at work."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.lifelike import lifelike
from tests.browser.test_console import make_lab, walk
from tests.browser.visits import Visits

COUNTER = "ns/videos/c/views%3Ahow-a-token-counts-once"


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, True)], ids=["desk", "phone"])
def test_the_console_of_a_service_at_work(
    visit: Visits, tmp_path: Path, phone: bool, dark: bool
) -> None:
    """``scripts/pictures`` puts what is shown on a desk into the documentation."""
    name = f"{'dark' if dark else 'light'}-{'phone' if phone else 'desk'}"
    with lifelike(tmp_path / "data") as (url, step), visit(url, phone=phone, dark=dark) as at:
        at.meant = {409}
        at.page.clock.install()
        page = at.go()
        busy = page.get_by_role("region", name="Busiest counters").locator("tbody tr")
        for at_once in range(1, 9):
            step()
            page.clock.fast_forward("00:05")
            steps = re.compile(r"^M[^L]+" + "L[^L]+" * at_once + "$")
            expect(busy.first.locator("path").last).to_have_attribute("d", steps)
        expect(busy).to_have_count(10)
        expect(page.locator(".tiles")).to_contain_text("on time")
        largest = page.get_by_role("region", name="Largest", exact=True)
        expect(largest.locator("tbody tr").first).to_contain_text("tokens:acme")
        at.check_access()
        at.shot(f"home-at-work-{name}", whole=False)
        at.go(COUNTER)
        expect(page.locator(".uplot canvas")).to_have_count(2)
        # It began ten minutes ago, and so do the charts of the last fifteen: in steps of 20 s.
        page.get_by_text("The same as a table").click()
        assert 30 <= page.locator("details tbody tr").count() <= 36
        page.get_by_text("The same as a table").click()
        at.check_access()
        page.evaluate("scrollTo(0, 0)")
        at.shot(f"counter-at-work-{name}", whole=False)
        at.go("health")
        expect(page.get_by_text("On time")).to_have_count(4)
        at.check_access()
        at.shot(f"health-at-work-{name}", whole=False)
        at.go("lab")
        make_lab(page)
        walk(page)
        at.shot(f"lab-at-work-{name}", whole=False)
