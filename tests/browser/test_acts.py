"""What the console changes: adds, clears, deletes and cancels, and settings of namespaces."""

import csv
import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import client_of
from tests.browser.visits import Visits


@pytest.fixture
def http(service: str) -> Iterator[httpx.Client]:
    """A client beside the page."""
    with client_of(service) as client:
        yield client


def count(http: httpx.Client, path: str) -> int:
    found: int = http.get(f"{path}?max_staleness=0s").json()["count"]
    return found


def confirm(page: Page, act: str, name: str) -> None:
    """Press the button *act*, type *name*, and press Enter."""
    page.locator(act).click()
    page.locator("#confirm").fill(name)
    page.keyboard.press("Enter")


def test_a_counter_is_added_to_cleared_and_deleted(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    path = "/default/counters/acted%3Aon"
    with visit(service) as at:
        page = at.go("ns/default/c/acted%3Aon")
        expect(page.locator("#nothing")).to_be_visible()
        expect(page.locator("#act-clear")).to_have_count(0)
        page.locator("#act-add").click()
        at.check_access()
        page.locator("#add-delta").fill("9223372036854775807")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("9 223 372 036 854 775 807")
        assert count(http, path) == 2**63 - 1
        confirm(page, "#act-clear", "another name")
        expect(page.get_by_role("alert").filter(has_text="That is not acted:on.")).to_be_visible()
        assert count(http, path) == 2**63 - 1
        page.locator("#confirm").fill("acted:on")
        at.check_access()
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("0")
        page.locator("#act-add").click()
        page.locator("#add-delta").fill("-3")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("−3")
        confirm(page, "#act-delete", "acted:on")
        expect(page.get_by_role("heading", level=1)).to_have_text("default")
        listed = http.get("/default/counters?prefix=acted").json()["counters"]
        assert listed == []


def test_an_event_is_cancelled_under_its_own_token(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """However large it is, with its bounds, and again if the answer was lost; items of atomic adds
    are not."""
    path = "/default/counters/undone"
    for key, delta in (("one", 2**53 + 1), ("two", 7)):
        key_of = {"Idempotency-Key": key}
        body = {"delta": delta, "at_most": 2**60, "at_least": -1}
        assert http.post(f"{path}/add", json=body, headers=key_of).is_success
    items = {"items": [{"counter": "undone", "delta": 3}, {"counter": "undone", "delta": 4}]}
    key_of = {"Idempotency-Key": "both"}
    assert http.post("/default/atomic/add", json=items, headers=key_of).is_success
    bodies: list[str] = []

    def lose(way: Route) -> None:
        bodies.append(way.request.post_data or "")
        way.fetch()
        way.abort()

    with visit(service) as at:
        at.is_down = True
        page = at.go("ns/default/c/undone")
        rows = page.locator("#events tbody tr")
        expect(rows).to_have_count(4)
        expect(rows.get_by_role("button")).to_have_count(2)
        expect(page.get_by_text("is cancelled only with all items")).to_be_visible()
        at.shot("cancel-events")
        page.route("**/cancel", lose)
        confirm(page, "#events tr:has-text('740 993') button", "undone")
        expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
        at.check_access()
        at.shot("cancel-dialog", whole=False)
        page.unroute_all(behavior="wait")
        page.get_by_role("button", name="Cancel it").click()
        expect(page.locator("#cancelled")).to_contain_text("is cancelled; it was counted.")
        expect(page.locator("#count")).to_have_text("14")
        expect(rows).to_have_count(3)
        assert len(bodies) == 1
    assert count(http, path) == 14
    key_of = {"Idempotency-Key": "one"}
    body = {"delta": 2**53 + 1, "at_most": 2**60, "at_least": -1}
    again = http.post(f"{path}/add", json=body, headers=key_of)
    assert again.json()["code"] == "token_cancelled"


def test_a_clear_is_cancelled(visit: Visits, service: str, http: httpx.Client) -> None:
    path = "/default/counters/cleared"
    for act, body in (("add", {"delta": 5}), ("clear", {})):
        key_of = {"Idempotency-Key": act}
        assert http.post(f"{path}/{act}", json=body, headers=key_of).is_success
    with visit(service) as at:
        page = at.go("ns/default/c/cleared")
        expect(page.locator("#count")).to_have_text("0")
        page.get_by_role("button", name="Cancel the clear").click()
        page.get_by_role("button", name="Keep it").click()
        confirm(page, "#events tr:has-text('clear') button", "cleared")
        expect(page.locator("#count")).to_have_text("5")


def test_an_add_whose_answer_was_lost_is_sent_again_under_its_token(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    bodies: list[str] = []

    def lose(way: Route) -> None:
        bodies.append(way.request.post_data or "")
        way.fetch()
        way.abort()

    with visit(service) as at:
        at.is_down = True
        page = at.go("ns/default/c/lost")
        page.route("**/add", lose)
        page.locator("#act-add").click()
        page.locator("#add-delta").fill("5")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
        shown = page.locator("dialog .token").inner_text()
        # Another amount is another add; the first one is still the first one.
        page.locator("#add-delta").fill("6")
        page.keyboard.press("Enter")
        expect(page.locator("dialog .token")).not_to_have_text(shown)
        page.unroute_all(behavior="wait")
        page.locator("#add-delta").fill("5")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("11")
        assert [shown in each for each in bodies] == [True, False]
        assert count(http, "/default/counters/lost") == 11


def test_an_add_past_a_bound_is_refused_and_may_be_made_again_when_there_is_room(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    path = "/default/counters/bounded"
    with visit(service) as at:
        at.meant = {409}
        page = at.go("ns/default/c/bounded")
        page.locator("#act-add").click()
        page.locator("#add-delta").fill("-1")
        page.get_by_text("Bounds", exact=True).click()
        page.locator("#add-at_least").fill("0")
        at.check_access()
        page.keyboard.press("Enter")
        refused = page.get_by_role("alert").filter(has_text="past at_least 0")
        expect(refused).to_be_visible()
        at.shot("add-bounds", whole=False)
        token = page.locator("dialog .token").inner_text()
        key = {"Idempotency-Key": "room"}
        assert http.post(f"{path}/add", json={"delta": 3}, headers=key).is_success
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.locator("#count")).to_have_text("2")
        row = page.locator("#events tbody tr").filter(has_text=token)
        expect(row).to_contain_text("refused −1")
        expect(row.get_by_role("button")).to_have_count(0)
        at.shot("refused-events")
        sent = {
            each["event_id"]: each["delta"] for each in http.get(f"{path}/events").json()["events"]
        }
        assert (sent[token], sorted(sent.values())) == (0, [-1, 0, 3])


def test_bounds_of_a_namespace_are_shown_set_and_taken_away(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """However large they are."""
    body = {"counter_type": "ACCURATE", "bounds": {"at_least": -(2**63)}}
    assert http.put("/bounds", json=body).status_code == 201
    with visit(service) as at:
        page = at.go("ns/bounds")
        expect(page.locator("dl.settings")).to_contain_text("boundsat_least: -9223372036854775808")
        page.locator("#act-change").click()
        page.locator("#set-at_most").fill(str(2**53 + 1))
        page.locator("#set-at_most").scroll_into_view_if_needed()
        at.check_access()
        at.shot("namespace-bounds", whole=False)
        page.keyboard.press("Enter")
        expect(page.locator("dl.settings")).to_contain_text("at_most: 9007199254740993")
        assert http.get("/bounds").json()["bounds"] == {
            "at_least": -(2**63),
            "at_most": 2**53 + 1,
        }
        page.locator("#act-change").click()
        for name in ("at_least", "at_most"):
            page.locator(f"#set-{name}").fill("")
        page.keyboard.press("Enter")
        expect(page.locator("dl.settings")).not_to_contain_text("bounds")
        assert "bounds" not in http.get("/bounds").json()


def test_a_history_is_saved_as_csv(visit: Visits, service: str, http: httpx.Client) -> None:
    key = {"Idempotency-Key": "csv"}
    assert http.post("/default/counters/csv/add", json={"delta": 7}, headers=key).is_success
    with visit(service) as at:
        page = at.go("ns/default/c/csv")
        expect(page.locator("figcaption").last).to_contain_text("Total: 7")
        with page.expect_download() as saved:
            page.locator("#act-csv").click()
        assert saved.value.suggested_filename == "csv.csv"
        with saved.value.path().open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["time", "count", "delta"]
        assert sum(int(delta) for _, _, delta in rows) == 7


def test_a_namespace_is_changed_and_deleted(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    assert http.put("/acted", json={"counter_type": "EVENTUAL"}).status_code == 201
    with visit(service) as at:
        at.meant = {400, 412}
        page = at.go("ns/acted")
        page.locator("#act-change").click()
        at.check_access()
        page.locator("#set-cache_ttl").fill("soon")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="cache_ttl")).to_be_visible()
        page.locator("#set-cache_ttl").fill("3s")
        page.locator("#set-adds_per_s").fill("100")
        page.keyboard.press("Enter")
        expect(page.locator("dl.settings")).to_contain_text(
            re.compile("cache_ttl3s.*adds_per_s100")
        )
        # What someone else changed meanwhile is not undone.
        page.locator("#act-change").click()
        page.locator("#set-cache_ttl").fill("4s")
        assert http.put("/acted", json={"future_limit": "4s"}).status_code == 200
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="read it again")).to_be_visible()
        page.keyboard.press("Escape")
        found = http.get("/acted").json()
        assert (found["cache_ttl"], found["future_limit"]) == ("3s", "4s")
        confirm(page, "#act-drop", "acted")
        expect(page.get_by_role("heading", level=1)).to_have_text("Counters")
        assert http.get("/acted").status_code == 404


def test_an_act_that_the_key_does_not_allow_names_the_scope(
    visit: Visits, guarded: tuple[str, list[str]]
) -> None:
    url, (_, writer) = guarded
    with visit(url) as at:
        at.meant = {401, 403, 404}
        page = at.go("ns/lab")
        page.get_by_label("Key", exact=True).fill(writer)
        page.keyboard.press("Enter")
        make = {"Authorization": f"Bearer {guarded[1][0]}"}
        body = {"counter_type": "ACCURATE"}
        made = httpx.put(
            f"{url}/v1/namespaces/lab", json=body, headers=make, timeout=100, trust_env=False
        )
        assert made.status_code in (200, 201)
        page.reload()
        page.get_by_label("Key", exact=True).fill(writer)
        page.keyboard.press("Enter")
        confirm(page, "#act-drop", "lab")
        expect(
            page.get_by_role("alert").filter(has_text="has the scope write, and this takes admin")
        ).to_be_visible()
