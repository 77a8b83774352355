"""The console as its readers meet it: clicked, typed, watched and looked over in a real browser.

Every page fails on any error in the browser's console, breaches of its policy among them, and on a
request to any other host.
"""

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import client_of
from tests.browser.visits import Visits

STEPS = ("send", "again", "hedge", "change")
#: The two counts after each step.
COUNTS = {"send": (1, 1), "again": (1, 2), "hedge": (2, 12), "change": (2, 112)}


@pytest.fixture(scope="module")
def http(service: str) -> Iterator[httpx.Client]:
    """A client beside the page, and counters for it to show."""
    with client_of(service) as client:
        add(client, "likes", 41)
        for name in ("a/b", "..", "big", "ünï 🙂", *(f"many-{each:02}" for each in range(50))):
            add(client, name, 2**62 if name == "big" else 1)
        for _ in range(4):
            add(client, "big", 2**62)
        for each in range(10):
            assert client.put(f"/zz-{each}", json={"counter_type": "EVENTUAL"}).status_code == 201
        yield client


def add(http: httpx.Client, counter: str, delta: int) -> None:
    """One add, under a key of its own."""
    segment = "".join(f"%{byte:02X}" for byte in counter.encode())
    key = {"Idempotency-Key": f"{counter.encode().hex()}-{add.__name__}-{next(NUMBERS)}"}
    answer = http.post(f"/default/counters/{segment}/add", json={"delta": delta}, headers=key)
    assert answer.status_code == 200, answer.text


NUMBERS = iter(range(10**9))


def walk(page: Page, press: str | None = None) -> None:
    """All of the lab's steps, clicked; or by keyboard, each reached by tabs and pressed."""
    for step in STEPS:
        button = page.locator(f"#do-{step}")
        expect(button).to_have_attribute("aria-disabled", "false")
        if press is None:
            button.click()
        else:
            tab_to(page, f"do-{step}")
            page.keyboard.press(press)
        exact, rough = COUNTS[step]
        expect(page.locator("#exact-count")).to_have_text(str(exact))
        expect(page.locator("#rough-count")).to_have_text(str(rough))


def make_lab(page: Page) -> None:
    """Create the lab's namespaces if they are missing."""
    make = page.locator("#make-lab")
    expect(make.or_(page.locator("#do-send"))).to_be_visible()
    if make.is_visible():
        make.click()


def tab_to(page: Page, wanted: str) -> None:
    """Press Tab until the element *wanted* has the focus."""
    for _ in range(60):
        if page.evaluate("document.activeElement.id") == wanted:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"no way by Tab to #{wanted}")


def test_namespaces_lead_to_counters_and_counts(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go()
        page.locator(".card").filter(has_text="default").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("default")
        expect(page.locator("dl.settings")).to_contain_text("rollup_window")
        page.get_by_role("link", name="a/b").click()
        expect(page.locator("#count")).to_have_text("1")
        expect(page).to_have_title("a/b · Counter console")
        page.go_back()
        page.get_by_label("exact name").fill("..")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("..")
        expect(page.locator("#count")).to_have_text("1")


def test_a_listing_goes_on_and_back_and_by_prefix(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go("ns/default")
        rows = page.locator("tbody th a")
        expect(rows).to_have_count(50)
        # Pressed twice before a response came, it still goes one page on; and the focus stays.
        page.locator("#page-next").focus()
        page.evaluate("for (const _ of [1, 2]) document.getElementById('page-next').click()")
        expect(rows.last).to_have_text("ünï 🙂")
        expect(page.locator(".pager")).to_contain_text("Page 2")
        expect(page.locator("#page-before")).to_be_focused()
        page.keyboard.press("Enter")
        expect(rows.first).to_have_text("..")
        expect(page.locator("#page-next")).to_be_focused()
        page.get_by_label("begin with").fill("many-4")
        page.get_by_role("button", name="List", exact=True).click()
        expect(rows).to_have_count(10)
        rows.first.click()
        expect(page.locator("#count")).to_be_visible()
        page.go_back()
        expect(page.get_by_label("begin with")).to_have_value("many-4")
        expect(rows).to_have_count(10)
        page.get_by_label("begin with").fill("missing")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No counter’s name begins with “missing”.")).to_be_visible()


def test_namespaces_are_filtered_by_a_part_of_their_names(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    names = sorted([*(f"team-{each:03}" for each in range(340)), "default"])
    listed = [{"namespace": each, "counter_type": "ACCURATE"} for each in names]
    nothing = {"namespace": "default", "counters": []}
    with visit(service) as at:
        at.page.route("**/v1/namespaces", lambda way: way.fulfill(json={"namespaces": listed}))
        at.page.route("**/busiest?*", lambda way: way.fulfill(json=nothing))
        page = at.go()
        cards = page.locator(".card")
        expect(cards).to_have_count(50)
        expect(page.locator("#found")).to_have_text("341 namespaces")
        page.locator("#page-next").focus()
        page.keyboard.press("Enter")
        expect(cards.first).to_contain_text("team-049")
        expect(page.locator("#page-next")).to_be_focused()
        page.get_by_label("Names that contain").press_sequentially("M-33")
        expect(page.locator("#found")).to_have_text("10 of 341 namespaces")
        expect(page.locator("#said")).to_have_text("10 of 341 namespaces")
        expect(cards).to_have_count(10)
        page.get_by_label("Names that contain").fill("missing")
        expect(page.get_by_text("No namespace has “missing” in its name.")).to_be_visible()
        at.check_access()
        page.get_by_label("Names that contain").fill("fau")
        expect(cards).to_have_count(1)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("default")
        page.go_back()
        expect(page.get_by_label("Names that contain")).to_have_value("fau")
        expect(cards).to_have_count(1)


def test_lists_refresh_by_themselves_and_pause(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """Counts, rates and sparklines; rows stay, so the focus does."""
    with visit(service) as at:
        at.page.clock.install()
        page = at.go("ns/default")
        page.get_by_label("begin with").fill("likes")
        page.keyboard.press("Enter")
        rows = page.get_by_role("region", name="Counters of default").locator("tbody tr")
        expect(rows).to_have_count(1)
        row = rows.first
        count = row.locator("td").first
        before = int(count.inner_text())
        row.get_by_role("link").focus()
        add(http, "likes", 5)
        page.clock.fast_forward("00:05")
        expect(count).to_have_text(str(before + 5))
        expect(row.get_by_role("link")).to_be_focused()
        page.clock.fast_forward("00:05")
        spark = row.get_by_role("img", name=re.compile("Change per second of likes: now 0, from 0"))
        expect(spark).to_be_visible()
        expect(row.locator("path").last).to_have_attribute("d", re.compile("^M.+L"))
        page.get_by_role("button", name="Pause").click()
        add(http, "likes", 1)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.fast_forward("00:30")
        expect(page.get_by_text("Paused")).to_be_visible()
        assert [each for each in asked if "/counters" in each] == []
        page.get_by_role("button", name="Resume").click()
        expect(count).to_have_text(str(before + 6))
        # Without a response it says so, and shows the last data.
        at.cut_off(True)
        page.clock.fast_forward("00:05")
        expect(page.get_by_text("Trying again.")).to_be_visible()
        expect(count).to_have_text(str(before + 6))
        at.cut_off(False)
        page.clock.fast_forward("00:30")
        expect(page.get_by_text("Trying again.")).to_be_hidden()


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("ns/default", "counters?"),
        ("ns/default", "shards"),
        ("health", "outcomes"),
        ("ns/default/c/likes", "history?"),
    ],
)
def test_a_rejected_key_is_asked_for_again_once(
    tab: Page, service: str, http: httpx.Client, place: str, part: str
) -> None:
    """Counted where they are answered: the page may ask before its clock is moved."""
    problem = {"code": "key_invalid", "title": "The API key is not valid", "status": 401}
    rejected: list[str] = []

    def reject(way: Route) -> None:
        rejected.append(way.request.url)
        way.fulfill(status=401, json=problem)

    tab.goto(f"{service}/console#/{place}")
    expect(tab.locator("table").last).to_be_visible()
    tab.route(re.compile(re.escape(part)), reject)
    tab.clock.run_for("00:11")
    expect(tab.locator("#ask")).to_be_visible()
    tab.keyboard.press("Escape")
    tab.clock.run_for("05:00")
    assert len(rejected) == 1
    expect(tab.locator("#ask")).to_be_hidden()
    expect(tab.get_by_role("button", name="Resume")).to_have_count(int(part == "counters?"))


#: The requests of each page when it is shown again, and the streams that it has open then.
SHOWN_AGAIN = {
    "": (r"/busiest\?|/overview$", 9, 0),
    "ns/default": (r"/counters\?|/shards$", 2, 0),
    "health": (r"/outcomes$|/overview$", 2, 0),
    "ns/default/c/likes": (r"/history\?|/live$|/likes\?(from|max_staleness)=|/holds\?", 7, 1),
}


@pytest.mark.parametrize("place", SHOWN_AGAIN, ids=["home", "namespace", "health", "counter"])
def test_a_hidden_tab_asks_for_nothing(
    tab: Page, service: str, http: httpx.Client, place: str
) -> None:
    """Shown again, it asks for each part once, and has one stream."""
    pattern, parts, streams = SHOWN_AGAIN[place]
    tab.goto(f"{service}/console#/{place}")
    tab.wait_for_function(ASKED_FOR, arg=[pattern, parts])
    other = tab.context.new_page()
    other.bring_to_front()
    # A response that comes when it is shown again would plan the next request by the paused clock.
    tab.wait_for_function("() => document.hidden && awaited === 0", polling=100)
    tab.clock.pause_at(tab.evaluate("Date.now() / 1000 + 1"))
    tab.evaluate("asked.length = 0")
    tab.clock.run_for("10:00")
    assert tab.evaluate("[asked, openStreams()]") == [[], 0]
    for page in (tab, other, tab):
        page.bring_to_front()
        is_hidden = "(hidden) => document.hidden === hidden"
        tab.wait_for_function(is_hidden, arg=page is other, polling=100)
    tab.clock.run_for(1)
    tab.wait_for_function(ASKED_FOR, arg=[pattern, parts], polling=100)
    asked = [each for each in tab.evaluate("asked") if not each.endswith("/live")]
    assert len(set(asked)) == len(asked) == parts - streams
    assert tab.evaluate("openStreams()") == streams
    other.close()


ASKED_FOR = """([pattern, least]) =>
    asked.filter((url) => new RegExp(pattern).test(url)).length >= least"""


@pytest.mark.parametrize(("place", "parts"), [("health", "outcomes"), ("ns/default", "shards")])
def test_a_slow_service_gets_one_request_at_a_time(
    tab: Page, service: str, http: httpx.Client, place: str, parts: str
) -> None:
    tab.goto(f"{service}/console#/{place}")
    expect(tab.locator("table").last).to_be_visible()
    tab.route(f"**/{parts}", lambda way: None)
    tab.evaluate("asked.length = 0")
    tab.clock.run_for("10:00")
    assert len([each for each in tab.evaluate("asked") if each.endswith(parts)]) <= 1


def test_the_largest_counts_come_first_if_asked_for(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go("ns/default")
        page.get_by_label("Largest count first").check()
        expect(page.locator("tbody th").first).to_have_text("big")


def test_the_busiest_counters_come_first_on_the_first_page(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    for counter, adds in (("busy", 6), ("busier", 12)):
        for _ in range(adds):
            add(http, counter, 1)
    with visit(service) as at:
        page = at.go()
        rows = page.get_by_role("region", name="Busiest counters").locator("tbody tr")
        expect(rows.first).to_contain_text("busier")
        expect(rows.nth(1)).to_contain_text("busy")
        expect(rows.first.get_by_role("img")).to_have_attribute(
            "aria-label", re.compile(r"^Adds per second of busier: now \d")
        )
        rows.first.get_by_role("link", name="busier").click()
        expect(page.locator("#count")).to_have_text("12")


def test_a_namespace_is_created_by_keyboard(visit: Visits, service: str) -> None:
    with visit(service) as at:
        page = at.page
        page.goto(f"{service}/")
        expect(page).to_have_url(re.compile("/console$"))
        new, name = page.locator("#new-namespace"), page.get_by_label("Name", exact=True)
        new.press("Enter")
        at.check_access()
        name.fill("made-here")
        name.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("made-here")
        expect(page.locator(".badge").first).to_have_text("ACCURATE")
        page.go_back()
        new.press("Enter")
        name.fill("made-here")
        name.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="already")).to_be_visible()
        page.keyboard.press("Escape")
        expect(new).to_be_focused()


def test_a_count_is_live_and_keeps_all_its_digits(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go("ns/default/c/likes")
        expect(page.locator("#live")).to_have_text("Live")
        before = int(page.locator("#count").inner_text())
        add(http, "likes", 1)
        expect(page.locator("#count")).to_have_text(str(before + 1))
        expect(page.locator("#events tbody tr").first).to_contain_text("+1")
        expect(page.locator("#said")).to_have_text(f"The count is {before + 1}.")
        at.go("ns/default/c/big")
        expect(page.locator("#count")).to_have_text("23 058 430 092 136 939 520")


def test_a_counter_shows_how_much_it_changed_in_the_last_hour_and_day(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    add(http, "tiles", 41)
    with visit(service) as at:
        page = at.go("ns/default/c/tiles")
        values = page.locator(".tiles .value")
        expect(values).to_have_text(["+41", "+41"])
        expect(page.locator(".tiles")).to_contain_text("0 the day before")
        add(http, "tiles", -2)
        expect(values).to_have_text(["+39", "+39"])


def test_a_counter_that_was_never_written_is_not_shown_as_one_at_zero(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """With those whose names begin alike; the page of one that counts to 0 is a counter's."""
    add(http, "zero-sum", 1)
    add(http, "zero-sum", -1)
    with visit(service) as at:
        page = at.go("ns/default/c/zero-some")
        expect(page.locator("#nothing")).to_contain_text("Nothing was ever counted here")
        expect(page.locator("#count")).to_have_count(0)
        page.locator("#nothing").get_by_role("link", name="zero-sum").click()
        expect(page.locator("#count")).to_have_text("0")
        expect(page.locator("#events tbody tr")).to_have_count(2)


def test_a_stale_count_does_not_replace_a_newer_one(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    """The first count is of the age of those on the stream."""
    key = {"Idempotency-Key": "stale"}
    assert http.post("/zz-1/counters/new/add", json={"delta": 1}, headers=key).is_success
    with visit(service) as at:
        at.page.route("**/live", lambda way: None)
        page = at.go("ns/zz-1/c/new")
        expect(page.locator("#as-of")).to_contain_text("eventual")


def test_a_stream_that_fell_silent_is_not_called_live(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        at.page.clock.install()
        page = at.go("ns/default/c/likes")
        expect(page.locator("#live")).to_have_text("Live")
        # The count was announced just now, and is not announced again for five seconds.
        more = int(page.locator("#count").inner_text()) + 1
        add(http, "likes", 1)
        expect(page.locator("#count")).to_have_text(str(more))
        page.clock.fast_forward("00:20")
        expect(page.locator("#live")).to_have_text("Not live")
        add(http, "likes", 1)
        expect(page.locator("#live")).to_have_text("Live")


def test_a_chart_shows_the_same_as_its_table(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        page = at.go("ns/default/c/likes")
        # Behind the count by the accept limit and a window: it is read every ten seconds.
        captions, charts = page.locator("figcaption"), page.locator(".uplot canvas")
        expect(captions.last).to_contain_text("Total: 4")
        expect(captions.first).to_contain_text(
            re.compile(r"^Change a (second|minute): \+4\d in all")
        )
        expect(charts).to_have_count(2)
        page.get_by_text("The same as a table").click()
        expect(page.locator("details tbody tr").first).to_contain_text("4")
        for span in ("1 h", "24 h", "7 d", "30 d", "15 min"):
            page.get_by_role("button", name=span).click()
            expect(page.get_by_role("button", name=span)).to_have_attribute("aria-pressed", "true")
            expect(charts).to_have_count(2)
        at.go("ns/default/c/big")
        text = "+23 058 430 092 136 939 520 in all"
        expect(captions.first).to_contain_text(text)


def test_the_lab_runs_by_clicks_and_reports_each_response(visit: Visits, service: str) -> None:
    with visit(service) as at:
        at.meant = {409}
        page = at.go("lab")
        make_lab(page)
        walk(page)
        log = page.locator("#log > li")
        expect(log).to_have_count(4)
        expect(log.nth(0)).to_contain_text("409 token_conflict")
        expect(log.nth(1)).to_contain_text("1 counted")
        expect(log.nth(1)).to_contain_text("9 replayed")
        expect(log.nth(2)).to_contain_text("replayed: true")
        expect(log.nth(3)).to_contain_text("replayed: false")
        page.locator("#do-restart").click()
        expect(page.locator("#exact-count")).to_have_text("0")
        expect(page.locator("#do-again")).to_have_attribute("aria-disabled", "true")


def test_the_lab_finishes_an_add_whose_response_was_lost(visit: Visits, service: str) -> None:
    def lose(way: Route) -> None:
        way.fetch()
        way.abort()

    with visit(service) as at:
        at.is_down = True
        page = at.go("lab")
        make_lab(page)
        page.route("**/add", lose)
        page.locator("#do-send").click()
        lost = page.locator("#log > li").first
        expect(lost).to_contain_text("send the same request again")
        expect(lost).to_contain_text("The counts after it are not known.")
        # Both requests were lost, and the lab names the first: the other may still be under way.
        page.unroute_all(behavior="wait")
        page.locator("#do-again").click()
        expect(page.locator("#exact-count")).to_have_text("1")
        expect(page.locator("#exact-count")).to_have_class(re.compile(r"\bright\b"))
        expect(page.locator("#rough-count")).to_have_text("2")
        expect(page.locator(".tally")).to_contain_text("You wanted 1 adds of 1, and sent 2")


def test_opening_the_lab_changes_nothing(visit: Visits, service: str) -> None:
    """Regression: following a link to it created two namespaces."""
    made: list[str] = []

    def keep(way: Route) -> None:
        if way.request.method == "PUT":
            made.append(way.request.url.rpartition("/")[2])
        way.fulfill(json={"namespaces": []})

    with visit(service) as at:
        at.page.route(re.compile(r"/v1/namespaces(/lab(-rough)?)?$"), keep)
        page = at.go("lab")
        make = page.locator("#make-lab")
        expect(make).to_be_visible()
        expect(page.locator(".panel")).to_contain_text("“lab” (ACCURATE) and “lab-rough”")
        at.check_access()
        assert made == []
        with page.expect_response("**/v1/namespaces/lab-rough"):
            make.click()
        assert made == ["lab", "lab-rough"]


def test_the_lab_runs_by_keyboard_alone(visit: Visits, service: str) -> None:
    with visit(service) as at:
        at.meant = {409}
        page = at.go("")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        for _ in range(5):
            page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Retry lab", exact=True)).to_be_focused()
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert shown == "solid"
        page.keyboard.press("Enter")
        make_lab(page)
        walk(page, "Enter")
        expect(page.locator("#do-change")).to_be_focused()
        expect(page.locator("#said")).to_contain_text(
            "the accurate count is 2, the best-effort one 112"
        )


def test_health_reports_outcomes_and_workers(
    visit: Visits, service: str, http: httpx.Client
) -> None:
    with visit(service) as at:
        at.page.clock.install()
        page = at.go("health")
        expect(page.locator(".uplot canvas")).to_be_visible()
        expect(page.locator("dl.sums").first).to_contain_text("original")
        expect(page.locator(".u-legend")).to_contain_text("Bound reached")
        page.get_by_text(re.compile(r"^\d+ outcomes that did not happen$")).click()
        expect(page.locator("details dl.sums")).to_contain_text("voided")
        rows = page.get_by_role("region", name="Rollup of the namespaces").locator("tbody")
        expect(rows.filter(has_text="default")).to_contain_text("On time")
        page.get_by_role("button", name="Shards of default").click()
        row = page.get_by_role("region", name="Shards of default").locator("tbody tr")
        expect(row).to_have_count(1)
        expect(row.locator("code")).not_to_be_empty()
        at.check_access()
        # Cut off, it goes on showing the last data, and says so; with one alarm for all.
        old = page.get_by_text("No answer now; this is the last known state.")
        at.cut_off(True)
        page.clock.fast_forward("00:05")
        expect(old.first).to_be_visible()
        expect(row).to_have_count(1)
        expect(page.get_by_role("alert")).to_have_count(1)
        at.cut_off(False)
        page.clock.fast_forward("00:05")
        expect(old.first).to_be_hidden()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_problem_says_what_to_do(visit: Visits, service: str) -> None:
    with visit(service) as at:
        at.meant = {404}
        page = at.go("ns/nowhere")
        box = page.get_by_role("alert").filter(has_text="No such namespace")
        expect(box).to_contain_text("there is no namespace 'nowhere'")
        expect(box).to_contain_text("Look at the list of namespaces")
        expect(box.get_by_role("link")).to_have_attribute("href", "problems#namespace_unknown")
        at.go("ns/default/c/%zz")
        expect(page.get_by_role("heading", level=1)).to_have_text("There is nothing here")


@pytest.mark.parametrize(
    ("status", "body"), [(200, "<html>Sign in</html>"), (502, '{"message": "no upstream"}')]
)
def test_a_response_of_a_proxy_is_reported_as_such(
    visit: Visits, service: str, status: int, body: str
) -> None:
    """As of a proxy that asks for a password, or has an error of its own kind."""
    with visit(service) as at:
        at.meant = {502}
        at.page.route("**/v1/namespaces", lambda way: way.fulfill(status=status, body=body))
        box = at.go().get_by_role("alert").filter(has_text=f"HTTP {status}")
        expect(box).to_contain_text("a proxy in between may have made it")


def test_colours_change_and_are_forgotten(visit: Visits, service: str) -> None:
    with visit(service) as at:
        page = at.go()
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(background) == "rgb(255, 255, 255)"
        page.locator("#theme").click()
        assert page.evaluate(background) != "rgb(255, 255, 255)"
        page.reload()
        assert page.evaluate(background) == "rgb(255, 255, 255)"


def test_without_admin_scope_the_lab_names_the_scope_it_needs(
    visit: Visits, guarded: tuple[str, list[str]]
) -> None:
    url, (_, writer) = guarded
    with visit(url) as at:
        at.meant = {401, 403}
        page = at.go("lab")
        page.get_by_label("Key", exact=True).fill(writer)
        page.keyboard.press("Enter")
        page.locator("#make-lab").click()
        box = page.get_by_role("alert").filter(has_text="The lab needs the namespace")
        expect(box).to_contain_text("has the scope write, and this takes admin")
        expect(box).to_contain_text("Ask someone with an admin key")
        at.go("health")
        expect(page.get_by_role("alert").filter(has_text="does not allow")).to_be_visible()


def test_a_key_is_used_and_not_stored(visit: Visits, guarded: tuple[str, list[str]]) -> None:
    url, (key, _) = guarded
    with visit(url) as at:
        at.meant = {401, 409}
        page = at.go("lab")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("An API key is needed")
        page.get_by_label("Key", exact=True).fill("ck_mistyped")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("The API key is not valid")
        # No browser can send this one: it is not the service that does not answer.
        page.get_by_label("Key", exact=True).fill("ck_copied…")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("This is not a key")
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        make_lab(page)
        walk(page)
        at.go("ns/lab")
        page.locator("tbody th a").first.click()
        expect(page.locator("#live")).to_have_text("Live")
        kept = page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
        assert kept == ["", 0, 0]
        assert key not in page.url
        page.reload()
        expect(dialog).to_contain_text("An API key is needed")


def test_keys_are_created_shown_once_and_revoked_by_typing(
    visit: Visits, guarded: tuple[str, list[str]]
) -> None:
    url, (admin, _) = guarded
    with visit(url, phone=True, dark=True) as at:
        at.meant = {400, 401}
        page = at.go("keys")
        page.get_by_label("Key", exact=True).fill(admin)
        page.keyboard.press("Enter")
        rows = page.locator("tbody tr")
        expect(rows.filter(has_text="(in use)")).to_have_count(1)
        at.check_access()
        page.locator("#new-key").press("Enter")
        page.get_by_label("Namespaces", exact=True).fill("Shop")
        page.get_by_label("Label").fill("checkout")
        at.check_access()
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="'Shop' is not valid")).to_be_visible()
        page.get_by_label("Namespaces", exact=True).fill("shop-* eu")
        page.keyboard.press("Enter")
        shown = page.locator("#made-key")
        expect(shown).to_have_value(re.compile("^ck_"))
        text = shown.input_value()
        key_id, secret = text.split("_")[1:]
        at.check_access()
        page.keyboard.press("Escape")
        expect(shown).to_be_visible()
        page.get_by_role("button", name="Done").press("Enter")
        expect(shown).to_have_count(0)
        row = rows.filter(has_text=key_id)
        expect(row).to_contain_text("shop-*, eu")
        expect(row).to_contain_text("valid")
        assert secret not in page.content()
        bearer = {"Authorization": f"Bearer {text}"}
        with httpx.Client(timeout=100, trust_env=False, headers=bearer) as client:
            # Within two seconds of its creation a key is known.
            assert client.get(f"{url}/v1/namespaces").status_code in (200, 401)
        page.get_by_role("button", name=f"Revoke the key {key_id}").press("Enter")
        page.get_by_label("to confirm").fill("something")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text=f"That is not {key_id}")).to_be_visible()
        expect(row).to_contain_text("valid")
        at.check_access()
        page.get_by_label("to confirm").fill(key_id)
        page.keyboard.press("Enter")
        expect(row).to_contain_text("revoked")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        at.shot("keys-dark-phone")


def test_without_keys_it_says_how_to_make_the_first(visit: Visits, service: str) -> None:
    with visit(service) as at:
        page = at.go("keys")
        expect(page.locator(".empty")).to_contain_text("counter key create")
        expect(page.locator("#new-key")).to_have_count(0)


def test_a_key_stays_for_the_session_if_asked_until_signed_out(
    visit: Visits, guarded: tuple[str, list[str]]
) -> None:
    url, (admin, _) = guarded
    kept = "[sessionStorage.length, localStorage.length, document.cookie]"
    with visit(url) as at:
        at.meant = {401}
        page = at.go()
        page.get_by_label("Key", exact=True).fill(admin)
        page.get_by_label("Keep it for this session").check()
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator(".card").first).to_be_visible()
        assert page.evaluate(kept) == [1, 0, ""]
        page.reload()
        expect(page.locator(".card").first).to_be_visible()
        page.locator("#key").click()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("dialog")).to_contain_text("An API key is needed")
        assert page.evaluate(kept) == [0, 0, ""]


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, True)], ids=["desk", "phone"])
def test_every_page_is_accessible(
    visit: Visits, service: str, http: httpx.Client, phone: bool, dark: bool
) -> None:
    """axe finds nothing, and no page is wider than its window."""
    name = f"{'dark' if dark else 'light'}-{'phone' if phone else 'desk'}"
    with visit(service, phone=phone, dark=dark) as at:
        at.meant = {404, 409}
        page = at.go("lab")
        make_lab(page)
        walk(page)
        pages = {
            "lab": page.locator("#do-restart"),
            "": page.locator(".card").first,
            "ns/default": page.locator("tbody tr").first,
            "ns/default/c/likes": page.locator(".u-legend").first,
            "ns/default/c/lik": page.locator("#nothing"),
            "health": page.locator(".u-legend"),
            "ns/nowhere": page.locator(".problem"),
        }
        for place, sign in pages.items():
            at.go(place)
            expect(sign).to_be_visible()
            at.shot(f"{place.replace('/', '-') or 'home'}-{name}")
            if place == "ns/default":
                counts = page.get_by_role("region", name="Counters of default").locator(
                    "td:nth-child(2)"
                )
                ends = counts.evaluate_all("all => all.map((x) => x.getBoundingClientRect().right)")
                assert max(ends) <= page.evaluate("innerWidth"), "a count is cut off"
            at.check_access()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        page.locator("#key").click()
        at.shot(f"key-{name}")
        at.check_access()
