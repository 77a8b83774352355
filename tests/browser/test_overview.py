"""What the console shows of all namespaces: its first page, health, the search, and sums."""

import re

import httpx
from playwright.sync_api import Route, expect

from tests.browser.test_console import http
from tests.browser.visits import Visits

__all__ = ["http"]


def test_the_worst_rollup_comes_first(visit: Visits, service: str, http: httpx.Client) -> None:
    """As the service sorts them."""

    def make_late(way: Route) -> None:
        answer = way.fetch()
        found = answer.json()
        late, alone, *_ = found["namespaces"]
        late["overdue_seconds"], alone["unowned"] = 90.0, 1
        way.fulfill(response=answer, json=found)

    with visit(service) as at:
        at.page.route("**/v1/overview", make_late)
        page = at.go("health")
        rows = page.get_by_role("region", name="Rollup of the namespaces").locator("tbody")
        expect(rows.nth(0)).to_contain_text(re.compile("Overdue.*90 s"))
        expect(rows.nth(1)).to_contain_text("1 without a worker")
        expect(rows.nth(2)).to_contain_text("On time")


def test_the_first_page_is_never_empty(visit: Visits, service: str, http: httpx.Client) -> None:
    """The largest and latest counters are there when nothing is added to, and so are the adds."""
    nothing = {"namespace": "default", "counters": []}
    with visit(service) as at:
        at.page.route("**/busiest?*", lambda way: way.fulfill(json=nothing))
        page = at.go()
        expect(
            page.get_by_role("region", name="Largest", exact=True).locator("tbody tr").first
        ).to_contain_text("23 058 430 092 136 939 520")
        expect(
            page.get_by_role("region", name="Latest", exact=True).locator("tbody tr")
        ).to_have_count(10)
        expect(page.get_by_text("Busiest now")).to_be_hidden()
        expect(page.locator(".uplot canvas")).to_be_visible()
        expect(page.locator(".tiles")).to_contain_text(re.compile(r"Adds in 15 min\d"))
        expect(page.locator(".card").first).to_contain_text(
            re.compile(r"\d+ counters? · .* adds/s")
        )


def test_a_search_finds_a_part_of_a_name(visit: Visits, service: str, http: httpx.Client) -> None:
    """From every page, by keyboard alone; and goes on where it stopped."""
    with visit(service) as at:
        page = at.go("health")
        expect(page.locator(".u-legend")).to_be_visible()
        page.keyboard.press("/")
        expect(page.locator("#search")).to_be_focused()
        page.keyboard.type("ANY-")
        page.keyboard.press("Enter")
        rows = page.get_by_role("region", name="Counters").locator("tbody tr")
        expect(rows).to_have_count(50)
        expect(page.locator("#found-counters")).to_have_text(
            "50 counters with “ANY-” in the name so far"
        )
        page.locator("#search-on").click()
        expect(page.locator("#search-on")).to_be_hidden()
        expect(page.locator("#found-counters")).to_have_text("50 counters with “ANY-” in the name")
        at.check_access()
        page.keyboard.press("/")
        page.keyboard.type("zz-3")
        page.keyboard.press("Enter")
        expect(page.locator("#found-counters")).to_have_text("No counters with “zz-3” in the name")
        page.get_by_role("link", name="zz-3").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("zz-3")
        # A slash is a character in a field.
        page.get_by_label("exact name").press_sequentially("a/b")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("a/b")


def test_a_list_has_the_sum_of_its_counters(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go("ns/default")
        page.get_by_label("begin with").fill("many-1")
        page.get_by_label("With their sum").check()
        expect(page.locator("#sum")).to_have_text(
            "The sum of 10 counters that begin with “many-1”: 10"
        )
