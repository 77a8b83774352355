"""Holds in the console: what is open, what becomes of it, and a budget as a bar."""

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.conftest import client_of
from tests.browser.visits import Visits

PLACE = "/default/counters"


@pytest.fixture
def http(service: str) -> Iterator[httpx.Client]:
    """A client beside the page."""
    with client_of(service) as client:
        yield client


def hold(http: httpx.Client, path: str, amount: int, expires_in: str = "5m", **bounds: int) -> str:
    """Hold *amount*; return the hold's id."""
    body = {"amount": amount, "expires_in": expires_in, **bounds}
    key = {"Idempotency-Key": f"{path}-{amount}"}
    answer = http.post(f"{path}/holds", json=body, headers=key)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["hold"])


def add(http: httpx.Client, path: str, delta: int) -> None:
    key = {"Idempotency-Key": f"{path}-add-{delta}"}
    assert http.post(f"{path}/add", json={"delta": delta}, headers=key).is_success


def row(page: Page, amount: str) -> Locator:
    """The row of the open hold of *amount*."""
    cell = page.locator("td.number").get_by_text(amount, exact=True)
    return page.get_by_role("region", name="Open holds").locator("tbody tr").filter(has=cell)


def bar(page: Page, name: str) -> Locator:
    return page.locator(f"figure[data-bound={name}]")


def test_an_amount_is_held_extended_and_settled(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    path = f"{PLACE}/held%3Aone"
    with visit(service) as at:
        at.meant = {400, 409}
        page = at.go("ns/default/c/held%3Aone")
        expect(page.locator("#nothing")).to_be_visible()
        page.locator("#act-hold").click()
        page.locator("#hold-amount").fill("50")
        page.locator("#hold-lasts").fill("4m")
        page.get_by_text("Bounds", exact=True).click()
        page.locator("#hold-at_most").fill("40")
        at.check_access()
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="past at_most 40")).to_be_visible()
        page.locator("#hold-at_most").fill("1000")
        page.keyboard.press("Enter")
        expect(page.locator("#held")).to_have_text("+50 held")
        expect(page.locator("#count")).to_have_text("0")
        expect(row(page, "+50")).to_contain_text(re.compile(r"in \d+ (s|min)"))
        at.check_access()
        (open_hold,) = http.get("/default/holds?counter=held:one").json()["holds"]

        row(page, "+50").get_by_role("button", name="Extend").click()
        page.locator("#extend-lasts").fill("for ever")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="expires_in")).to_be_visible()
        page.locator("#extend-lasts").fill("6m")
        at.check_access()
        page.keyboard.press("Enter")
        expect(page.locator("#said")).to_contain_text("The hold expires at")
        (extended,) = http.get("/default/holds?counter=held:one").json()["holds"]
        assert extended["expires_at"] > open_hold["expires_at"]
        shown = row(page, "+50").locator("time").last
        expect(shown).to_have_attribute("datetime", extended["expires_at"])

        row(page, "+50").get_by_role("button", name="Settle").click()
        expect(page.locator("#settle-amount")).to_have_value("50")
        at.shot("holds-settle", whole=False)
        page.locator("#settle-amount").fill("-1")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="same sign")).to_be_visible()
        page.locator("#settle-amount").fill("37")
        at.check_access()
        page.keyboard.press("Enter")
        expect(page.locator("#said")).to_have_text("+37 is counted, and the hold has ended.")
        expect(page.locator("#count")).to_have_text("37")
        expect(page.locator("#held")).to_be_hidden()
        expect(page.get_by_text("There are no open holds.")).to_be_visible()
        assert page.evaluate("document.activeElement.id") == "main"
    settled = http.get(f"/default/holds/{open_hold['hold']}").json()
    assert (settled["state"], settled["settled"]) == ("settled", 37)
    assert http.get(f"{path}?max_staleness=0s").json()["count"] == 37


def test_holds_are_listed_by_their_expiry_with_the_time_of_their_begin(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """And a page's length of them, whatever their number; each id can be copied."""
    path = f"{PLACE}/held-many"
    ids = {each: hold(http, path, each, f"{240 + 5 * each}s") for each in (3, 1, 2)}
    with visit(service, permissions=["clipboard-read", "clipboard-write"]) as at:
        page = at.go("ns/default/c/held-many")
        rows = page.get_by_role("region", name="Open holds").locator("tbody tr")
        expect(rows.locator("td.number")).to_have_text(["+1", "+2", "+3"])
        begun = rows.first.locator("time").first.get_attribute("datetime")
        events = http.get(f"{path}/events?limit=1").json()["events"]
        latest = rows.nth(1).locator("time").first.get_attribute("datetime")
        assert begun is not None
        assert latest is not None
        assert events[0]["event_time"].startswith(latest.removesuffix("Z"))
        assert begun < latest
        rows.first.get_by_role("button", name="Copy").click()
        expect(page.locator("#said")).to_have_text("The id of the hold is copied.")
        assert page.evaluate("navigator.clipboard.readText()") == ids[1]
        for each in range(4, 22):
            hold(http, path, each)
        expect(page.get_by_text("The 20 that expire first")).to_be_visible()
        expect(rows).to_have_count(20)


def test_a_hold_is_released_and_a_loser_is_shown_what_happened(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    path = f"{PLACE}/held-lost"
    ids = [hold(http, path, each) for each in (1, 2, -3)]
    with visit(service) as at:
        at.meant = {409, 410}
        page = at.go("ns/default/c/held-lost")
        expect(page.locator("#held")).to_have_text("+3 and −3 held")
        expect(page.locator("#events tbody tr")).to_have_count(3)
        row(page, "+1").get_by_role("button", name="Release").click()
        at.check_access()
        page.keyboard.press("Escape")
        assert http.get(f"/default/holds/{ids[0]}").json()["state"] == "open"
        row(page, "+1").get_by_role("button", name="Release").click()
        page.get_by_role("button", name="Release", exact=True).click()
        expect(page.locator("#held")).to_have_text("+2 and −3 held")
        expect(page.locator("#events tbody tr")).to_have_count(4)
        assert http.get(f"/default/holds/{ids[0]}").json()["state"] == "released"
        # Its client settles the second one, and releases the third, while the dialog is open.
        row(page, "+2").get_by_role("button", name="Release").click()
        settle = http.post(f"/default/holds/{ids[1]}/settle", json={"amount": 2})
        assert settle.is_success
        page.get_by_role("button", name="Release", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("The hold was settled: the hold of 2")
        page.keyboard.press("Escape")
        expect(row(page, "+2")).to_have_count(0)
        row(page, "−3").get_by_role("button", name="Settle").click()
        assert http.post(f"/default/holds/{ids[2]}/release").is_success
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("The hold was released")
        page.keyboard.press("Escape")
        expect(page.get_by_text("There are no open holds.")).to_be_visible()


def test_a_lost_answer_is_sent_again_and_holds_and_settles_once(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    def lose(way: Route) -> None:
        way.fetch()
        way.abort()

    unanswered = re.compile("does not answer")
    with visit(service) as at:
        at.is_down = True
        page = at.go("ns/default/c/held-again")
        page.route("**/counters/held-again/holds", lose)
        page.locator("#act-hold").click()
        page.locator("#hold-amount").fill("9007199254740993")
        page.locator("#hold-lasts").fill("5m")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text=unanswered)).to_be_visible()
        page.unroute_all(behavior="wait")
        page.keyboard.press("Enter")
        large = "+9 007 199 254 740 993"
        expect(page.locator("#held")).to_have_text(f"{large} held")
        page.route("**/settle", lose)
        row(page, large).get_by_role("button", name="Settle").click()
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text=unanswered)).to_be_visible()
        page.unroute_all(behavior="wait")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text(large.removeprefix("+"))
        expect(page.locator("#held")).to_be_hidden()


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, True)], ids=["desk", "phone"])
def test_a_budget_is_a_bar(
    visit: Visits, service: str, http: httpx.Client, phone: bool, dark: bool
) -> None:
    """Of the namespace's bounds: what is counted, what is held, and the room."""
    name = f"{'dark' if dark else 'light'}-{'phone' if phone else 'desk'}"
    bounds = {"at_least": 0, "at_most": 1000}
    namespace = f"budget-{name}"
    made = http.put(f"/{namespace}", json={"counter_type": "EVENTUAL", "bounds": bounds})
    assert made.status_code == 201
    path = f"/{namespace}/counters/team%3Aa"
    add(http, path, 370)
    for amount in (60, 30, 10, -20):
        hold(http, path, amount)
    with visit(service, phone=phone, dark=dark) as at:
        page = at.go(f"ns/{namespace}/c/team%3Aa")
        most, least = bar(page, "at_most"), bar(page, "at_least")
        expect(most.locator("figcaption")).to_contain_text("At most 1 000, of the namespace")
        expect(most.locator("li")).to_have_text(["counted 370", "held 100", "room 530"])
        expect(least.locator("li")).to_have_text(["held 20", "room 350"])
        wide = most.locator(".bar span").evaluate_all(
            "(all) => all.map((x) => Math.round(x.getBoundingClientRect().width))"
        )
        assert [round(100 * each / sum(wide)) for each in wide] == [37, 10, 53]
        at.check_access()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        at.shot(f"holds-{name}")
        add(http, path, 30)
        expect(most.locator("li")).to_have_text(["counted 400", "held 100", "room 500"])


def test_a_budget_may_be_of_an_event_or_chosen_and_may_be_overspent(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    path = f"{PLACE}/held-over"
    settled = hold(http, path, 50, at_most=100)
    hold(http, path, 40, at_most=100)
    with visit(service) as at:
        page = at.go("ns/default/c/held-over")
        most = bar(page, "at_most")
        expect(most.locator("figcaption")).to_contain_text(
            "At most 100, of the latest event that has one"
        )
        expect(most.locator("li")).to_have_text(["counted 0", "held 90", "room 10"])
        over = http.post(f"/default/holds/{settled}/settle", json={"amount": 70}).json()
        assert over["over"] is True
        expect(most.locator("li")).to_have_text(["counted 70", "held 40", "room 0", "over 10"])
        at.check_access()
        at.shot("holds-over")
        page.locator("#act-hold").click()
        at.shot("holds-form", whole=False)
        page.keyboard.press("Escape")
        page.locator("#act-budget").click()
        page.locator("#budget-at_most").fill("200")
        at.check_access()
        page.keyboard.press("Enter")
        expect(most.locator("figcaption")).to_contain_text("At most 200, chosen here")
        expect(most.locator("li")).to_have_text(["counted 70", "held 40", "room 90"])
        page.locator("#act-budget").click()
        page.locator("#budget-at_most").fill("")
        page.keyboard.press("Enter")
        expect(most.locator("figcaption")).to_contain_text("At most 100, of the latest event")
        page.reload()
        expect(most.locator("figcaption")).to_contain_text("At most 100, of the latest event")


def test_holds_are_kept_from_a_store_that_has_none(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """The page says why in one line."""
    add(http, f"{PLACE}/unheld", 1)
    detail = "a hold needs a store that keeps bounds"
    body = {"code": "not_supported", "title": "Not supported", "status": 501, "detail": detail}
    with visit(service) as at:
        at.meant = {501}
        at.page.route("**/holds?*", lambda way: way.fulfill(status=501, json=body))
        page = at.go("ns/default/c/unheld")
        expect(page.locator("#no-holds")).to_have_text(f"There are no holds here: {detail}.")
        expect(page.locator("#act-hold")).to_be_hidden()
        expect(page.locator("#act-budget")).to_have_count(0)
        expect(page.locator("#events tbody tr")).to_have_count(1)
        at.check_access()


def test_a_reader_is_shown_which_scope_a_change_of_a_hold_takes(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    hold(http, f"{PLACE}/held-read", 7)
    detail = "the key has the scope read, and this takes write"
    body = {"code": "scope_insufficient", "title": "No", "status": 403, "detail": detail}
    with visit(service) as at:
        at.meant = {403}
        page = at.go("ns/default/c/held-read")
        page.route("**/release", lambda way: way.fulfill(status=403, json=body))
        row(page, "+7").get_by_role("button", name="Release").click()
        page.get_by_role("button", name="Release", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text(detail)


def test_holds_and_their_ends_are_events_in_words(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """None has a button that cancels it: a hold is released, and a settle is corrected by an
    add."""
    path = f"{PLACE}/held-log"
    five, six = (hold(http, path, each, at_most=90) for each in (5, 6))
    refused = {"amount": 91, "expires_in": "5m", "at_most": 90}
    key = {"Idempotency-Key": "no room"}
    assert http.post(f"{path}/holds", json=refused, headers=key).status_code == 409
    assert http.post(f"/default/holds/{five}/settle", json={"amount": 4}).is_success
    assert http.post(f"/default/holds/{six}/release").is_success
    with visit(service) as at:
        page = at.go("ns/default/c/held-log")
        cells = page.locator("#events td.number")
        words = ["released +6", "settled +4", "refused hold +91", "hold +6", "hold +5"]
        expect(cells).to_have_text(words)
        expect(page.locator("#events").get_by_role("button")).to_have_count(0)
        at.shot("holds-events")
