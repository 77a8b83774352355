"""What is answered on the connection itself is answered as ASGI answers it, byte for byte.

Two services in this process get the same bytes over real sockets. One answers the hottest requests
directly; the other sends every request through ASGI. Their clocks stand still, so that what they
send back, and what they count, can be compared as it is.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counter.windows import settling_time
from tests.http.direct_cases import CASES
from tests.support.app import store_that_fails
from tests.support.bytes_on_wire import (
    CLOSE,
    JSON,
    LAST,
    add,
    add_body,
    get,
    one,
    post,
    request,
    token,
)
from tests.support.times import MINUTE, SECOND
from tests.support.wire import Wire, runner, statuses, wired

_MADE_ID = re.compile(rb"x-request-id: [0-9a-f]{20}(?=\r)")


class Pair:
    """The two services, and a loop for both."""

    def __init__(self, storage: str, directory: Path) -> None:
        self.runner = runner()
        self._stack = AsyncExitStack()
        self.runner.run(self._start(storage, directory))

    async def _start(self, storage: str, directory: Path) -> None:
        enter = self._stack.enter_async_context
        self.direct = await enter(wired(directory / "direct", storage=storage))
        self.plain = await enter(wired(directory / "plain", storage=storage, fast_lane=False))
        for each in self.both:
            await each.app.rest.within("eventual").create("EVENTUAL")
            await each.app.rest.within("quick").create("BEST_EFFORT")

    @property
    def both(self) -> tuple[Wire, Wire]:
        return self.direct, self.plain

    def close(self) -> None:
        self.runner.run(self._stack.aclose())
        self.runner.close()

    def tell(self, *parts: bytes) -> bytes:
        """Send both the same. What comes back must be the same, and so must be what was counted."""
        before = [Counter(each.service.tally) for each in self.both]
        answer, expected = (self.tell_one(each, *parts) for each in self.both)
        assert answer == expected
        after = [Counter(each.service.tally) for each in self.both]
        assert after[0] - before[0] == after[1] - before[1]
        return answer

    def tell_one(self, wire: Wire, *parts: bytes) -> bytes:
        """Send it to one of the two. Both name requests alike: each has names of its own."""
        return _MADE_ID.sub(b"x-request-id: made", self.runner.run(wire.tell(*parts)))

    def bodies(self, *parts: bytes) -> list[Any]:
        """The bodies of the answers, of which the last one ends the connection."""
        found = self.tell(*parts).split(b"\r\n\r\n")[1:]
        return [json.loads(each.partition(b"HTTP/1.1 ")[0]) for each in found]

    def advance(self, us: int) -> None:
        """Let time pass for both."""
        for each in self.both:
            each.app.clock.advance(us)

    def now_us(self) -> int:
        return self.direct.app.clock.now_us()

    @contextmanager
    def store_fails(self, *, after: bool = False) -> Iterator[None]:
        """Have no add be written."""
        with ExitStack() as stack:
            for each in self.both:
                stack.enter_context(store_that_fails(each.app, "append", after=after))
            yield

    @contextmanager
    def handled(self) -> Iterator[list[str]]:
        """The paths of requests that a route's handler answers for the direct one."""
        front, paths = self.direct.app.application.front, list[str]()
        reply = front.reply

        async def noted(call: Any, *found: Any) -> Any:
            paths.append(call.scope["path"])
            return await reply(call, *found)

        with patch.object(front, "reply", noted):
            yield paths


def paired(storage: str, directory: Path) -> Iterator[Pair]:
    pair = Pair(storage, directory)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from paired("sqlite", tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Over Cassandra as it is simulated: without transactions, an add takes other ways."""
    yield from paired("simulated", tmp_path_factory.mktemp("simulated"))


@pytest.fixture(params=["sqlite", "simulated"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Pair)
    return found


#: Where a request begins.
REQUEST = re.compile(rb"(?=\b[A-Z]+ \S+ HTTP/1\.\d\r\n)")


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered_and_counted_as_over_asgi(pair: Pair, name: str) -> None:
    sent, expected = CASES[name]
    alone: list[int] = []
    for each in filter(bytes.strip, REQUEST.split(sent)):
        # On a connection of its own: behind another, it might go through ASGI.
        found = statuses(pair.tell(each + LAST))
        alone += found[:-1] or found
    assert alone[: len(expected)] == expected
    together = statuses(pair.tell(sent + LAST))
    # The connection may have ended before its last request.
    assert together in (expected, [*expected, 200])


async def test_the_application_answers_them_without_the_folder_of_the_fast_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api.fastlane", "api.fastlane.lane"):
        monkeypatch.setitem(sys.modules, name, None)
    async with wired(tmp_path, fast_lane=False) as wire:
        assert statuses(await wire.tell(add(1) + get() + LAST)) == [200] * 3


def test_the_usual_add_and_get_never_reach_a_handler(pair: Pair) -> None:
    """Or all that is told here of the direct way would be told of another."""
    usual = get("u", namespace="eventual")
    pair.tell(usual + LAST)
    with pair.handled() as paths:
        for number in (1_000, 1_001):
            for namespace in ("default", "eventual", "quick"):
                pair.tell(add(number, counter="u", namespace=namespace) + LAST)
        pair.tell(usual * 2 + LAST)
        assert paths == []
        pair.tell(get("u") + add(1_000, 5, counter="u") + LAST)
        assert paths == [f"{one('u')}/add"]


def test_a_request_may_come_in_two_parts_cut_anywhere(pair: Pair) -> None:
    sent = add(1_100, counter="cut") + get("cut") + add(1_100, counter="cut") + LAST
    first = pair.tell(sent)
    assert statuses(first) == [200, 200, 200, 200]
    again = pair.tell(sent)
    for cut in range(1, len(sent)):
        assert pair.tell_one(pair.direct, sent[:cut], sent[cut:]) == again
    assert pair.bodies(get("cut") + LAST)[0]["count"] == 1


def test_a_large_body_may_come_in_parts(pair: Pair) -> None:
    body = add_body(1_300, time_us=pair.now_us()).ljust(65_536)
    sent = post(f"{one()}/add", body, JSON)
    parts = (sent[:100], sent[100:50_000], sent[50_000:-1], sent[-1:] + LAST)
    assert statuses(pair.tell(*parts)) == [200, 200]


def test_a_request_may_come_byte_by_byte(pair: Pair) -> None:
    sent = add(1_200) + request("GET", "/v1/namespaces") + add(1_200) + get() + LAST
    assert statuses(pair.tell(*(bytes([each]) for each in sent))) == [200] * 5


PIECES = st.one_of(
    st.builds(
        add,
        st.integers(2_000, 2_005),
        st.integers(1, 2),
        counter=st.sampled_from("ab"),
        namespace=st.sampled_from(["default", "default", "eventual", "quick", "none"]),
    ),
    st.builds(
        get,
        st.sampled_from(["a", "b", "%61", "a?max_staleness=0s", "a?max_staleness=1h"]),
        namespace=st.sampled_from(["default", "eventual", "quick", "none"]),
    ),
    st.sampled_from(
        [
            request("HEAD", one("a")),
            request("GET", "/v1/namespaces/eventual"),
            request("POST", f"{one('a')}/add"),
            request("GET", one("a"), "content-length: 3", body=b"abc"),
            post(f"{one('a')}/add", add_body(2_003), "content-type: application/json;x=y"),
            post(f"{one('a')}/add", b'{"delta": 1}', JSON),
            b"\r\n",
        ]
    ),
)
#: Nothing is sent behind these: that could make the answer to them get lost.
ENDS = st.sampled_from(
    [LAST, get("a", CLOSE), add(2_004, 1, CLOSE), request("GET", one("a"), version="1.0")]
)


#: The pair is the same for all examples: so are the requests sent to either.
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, suppress_health_check=FIXTURES)
@given(st.lists(PIECES, min_size=1, max_size=8), ENDS, st.data())
def test_any_row_of_requests_is_answered_as_over_asgi(
    pair: Pair, pieces: list[bytes], end: bytes, data: st.DataObject
) -> None:
    """Pipelined or not, cut where it likes."""
    sent = b"".join(pieces) + end
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=4)))
    pair.tell(*(sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)))


def batch(*items: tuple[int, str, int, int]) -> bytes:
    """A batch of adds: the number of its token, counter, delta and time of each."""
    return json.dumps(
        {
            "items": [
                {"counter": name, "delta": delta, "idempotency_token": token(number, time_us)}
                for number, name, delta, time_us in items
            ]
        }
    ).encode()


@pytest.mark.parametrize("namespace", ["default", "eventual", "quick", "none"])
def test_a_batch_is_answered_as_by_the_models(pair: Pair, namespace: str) -> None:
    """One service reads it the quick way, the other the longer way."""
    now_us = pair.now_us()
    late_us, ahead_us = now_us - MINUTE, now_us + MINUTE
    bodies = [
        batch((1, "a", 1, now_us), (2, "b", 2, now_us), (3, "a", 3, now_us)),
        batch((1, "a", 1, now_us), (4, "b", 2, now_us), (4, "b", 2, now_us)),
        batch((1, "a", 2, now_us), (5, "a", 1, now_us), (5, "a", 2, now_us)),
        batch((6, "a", 1, late_us), (7, "a", 1, now_us), (8, "a", 1, ahead_us)),
        batch((6, "a", 1, late_us)),
        batch((9, "a", 1, 0), (10, "a", 1, now_us)),
        batch((11, "a\n", 1, now_us), (12, "\u00e9 \U0001f600", 1, now_us)),
        batch((13, "a", 2**63, now_us), (14, "a", 2**63 - 1, now_us)),
        batch(*((number, "m", 1, now_us) for number in range(100, 1_100))),
        batch(*((number, "m", 1, now_us) for number in range(100, 1_101))),
        batch(),
        batch((15, "a", 1, now_us)) + b"x",
    ]
    before = [Counter(each.service.tally) for each in pair.both]
    for body in bodies:
        sent = post(f"/v1/namespaces/{namespace}/batch/add", body, JSON) + LAST
        quick = pair.tell_one(pair.direct, sent)
        with patch("api.routes.counters.read_batch", return_value=None):
            assert pair.tell_one(pair.plain, sent) == quick
    after = [Counter(each.service.tally) for each in pair.both]
    assert after[0] - before[0] == after[1] - before[1]


def adds_total(pair: Pair) -> dict[str, int]:
    """What the direct one's metrics say of adds."""
    text = pair.runner.run(pair.direct.tell(request("GET", "/metrics", CLOSE))).decode()
    found = re.findall(r'counter_adds_total\{outcome="(\w+)"\} (\d+)', text)
    return {outcome: int(number) for outcome, number in found}


def test_each_add_is_tallied_once_as_what_became_of_it(sqlite: Pair) -> None:
    """Those that are handed on to the handler too."""
    now_us = sqlite.now_us()
    late = add(3_002, counter="m", time_us=now_us - MINUTE)
    new, other = (add(3_001, delta, counter="m", time_us=now_us) for delta in (5, 6))
    for sent, outcome in (
        (new, "original"),
        (new, "replayed"),
        (other, "conflict"),
        (late, "voided"),
    ):
        before = adds_total(sqlite)
        sqlite.tell(sent + LAST)
        assert adds_total(sqlite) == before | {outcome: before[outcome] + 1}
    sqlite.advance(10 * SECOND)
    before = adds_total(sqlite)
    answer, _ = sqlite.bodies(new + LAST)
    assert answer["replayed"] is True
    assert adds_total(sqlite) == before | {"late_applied": before["late_applied"] + 1}


def test_a_replay_says_so_in_its_header(pair: Pair) -> None:
    sent = add(3_100, counter="r", time_us=pair.now_us())
    assert b"idempotency-replayed" not in pair.tell(sent + LAST)
    assert b"\r\nidempotency-replayed: true\r\n" in pair.tell(sent + LAST)


@pytest.mark.parametrize("lands", [False, True])
def test_a_write_that_fails_is_told_alike(sqlite: Pair, lands: bool) -> None:
    sent = add(3_200 + lands, counter="f", time_us=sqlite.now_us())
    with sqlite.store_fails(after=lands):
        problem, _ = sqlite.bodies(sent + LAST)
    assert (problem["code"], problem["applied"]) == ("store_unavailable", None)
    answer, _ = sqlite.bodies(sent + LAST)
    assert answer["replayed"] is lands


def test_a_fault_that_nobody_foresaw_is_told_alike(sqlite: Pair) -> None:
    async def fault(*_: Any) -> None:
        raise ZeroDivisionError

    with ExitStack() as stack:
        for each in sqlite.both:
            stack.enter_context(patch.object(each.app.store, "append", fault))
        problem, _ = sqlite.bodies(add(3_300, time_us=sqlite.now_us()) + LAST)
    assert (problem["status"], problem["code"]) == (500, "internal_error")


@pytest.mark.parametrize("request_", [get("f"), add(3_301, namespace="quick")])
def test_a_fault_of_a_get_or_of_the_cache_is_answered_alike(sqlite: Pair, request_: bytes) -> None:
    async def fault(*_: Any) -> None:
        raise ZeroDivisionError

    with ExitStack() as stack:
        for each in sqlite.both:
            stack.enter_context(patch.object(each.app.store, "heads", fault))
            stack.enter_context(patch.object(each.app.application.cache, "increment", fault))
        problem, _ = sqlite.bodies(request_ + LAST)
    assert (problem["status"], problem["code"]) == (500, "internal_error")


def test_too_much_at_once_is_told_alike(pair: Pair) -> None:
    """But for how long it takes: each has measured that for itself."""
    for each in pair.both:
        load = each.service.load
        with patch.object(load, "ahead", load.room):
            answer = pair.tell_one(each, add(3_400, time_us=pair.now_us()) + LAST)
        assert statuses(answer) == [503, 200]
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b'"code": "overloaded", "applied": null, "retry": "same_token"' in answer


def test_a_body_over_a_limit_that_was_set_low_is_refused_alike(pair: Pair) -> None:
    body = add_body(3_500, time_us=pair.now_us())
    sent = post(f"{one()}/add", body.ljust(2_049), JSON)
    with ExitStack() as stack:
        for each in pair.both:
            front = each.app.application.front
            stack.enter_context(patch.object(front, "body_bytes_max", 2_048))
        assert statuses(pair.tell(sent + LAST)) == [413, 200]


def test_a_namespace_that_was_made_and_deleted_is_known_and_unknown_at_once(pair: Pair) -> None:
    path, kind = "/v1/namespaces/brief", b'{"counter_type": "ACCURATE"}'
    make = request("PUT", path, JSON, f"content-length: {len(kind)}", body=kind)
    for _ in range(2):
        sent = add(3_600, namespace="brief", time_us=pair.now_us()) + get(namespace="brief") + LAST
        assert statuses(pair.tell(sent)) == [404, 404, 200]
        assert statuses(pair.tell(make + sent)) == [201, 200, 200, 200]
        assert statuses(pair.tell(request("DELETE", path) + LAST)) == [204, 200]
        # Until then the name is not free.
        pair.advance(settling_time(pair.direct.app.application.settings.dataset()) + SECOND)
