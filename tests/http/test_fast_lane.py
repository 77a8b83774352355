"""The fast lane answers like the application, byte for byte, over real sockets. The clocks of both
services do not move, so that their responses and counts can be compared. Tests of adds and gets run
both ways (tests/http/conftest.py)."""

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
from tests.http.fast_lane_cases import CASES
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
        self.fast = await enter(wired(directory / "fast", storage=storage))
        self.plain = await enter(wired(directory / "plain", storage=storage, fast_lane=False))
        for each in self.both:
            await each.app.rest.within("eventual").create("EVENTUAL")
            await each.app.rest.within("quick").create("BEST_EFFORT")

    @property
    def both(self) -> tuple[Wire, Wire]:
        return self.fast, self.plain

    def close(self) -> None:
        self.runner.run(self._stack.aclose())
        self.runner.close()

    def tell(self, *parts: bytes) -> bytes:
        """Send both the same, and compare the responses and the counts."""
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
        """The bodies of the responses, of which the last one ends the connection."""
        found = self.tell(*parts).split(b"\r\n\r\n")[1:]
        return [json.loads(each.partition(b"HTTP/1.1 ")[0]) for each in found]

    def advance(self, us: int) -> None:
        """Let time pass for both."""
        for each in self.both:
            each.app.clock.advance(us)

    def now_us(self) -> int:
        return self.fast.app.clock.now_us()

    @contextmanager
    def handled(self) -> Iterator[list[str]]:
        """The paths of requests that a route's handler answers for the one with the fast lane."""
        pipeline, paths = self.fast.app.application.pipeline, list[str]()
        respond = pipeline.respond

        async def noted(call: Any) -> Any:
            paths.append(f"{call.method} {call.counter}")
            return await respond(call)

        with patch.object(pipeline, "respond", noted):
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


#: The beginnings of requests.
REQUEST = re.compile(rb"(?=\b[A-Z]+ \S+ HTTP/1\.\d\r\n)")


@pytest.mark.parametrize("name", CASES)
def test_the_fast_lane_answers_like_the_application(pair: Pair, name: str) -> None:
    sent, expected = CASES[name]
    alone: list[int] = []
    for each in filter(bytes.strip, REQUEST.split(sent)):
        # On a connection of its own: behind another, it goes over ASGI.
        found = statuses(pair.tell(each + LAST))
        alone += found[:-1] or found
    assert alone[: len(expected)] == expected
    together = statuses(pair.tell(sent + LAST))
    # The connection may have ended before its last request.
    assert together in (expected, [*expected, 200])


async def test_the_application_works_without_the_fast_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api.fastlane", "api.fastlane.lane"):
        monkeypatch.setitem(sys.modules, name, None)
    async with wired(tmp_path, fast_lane=False) as wire:
        assert statuses(await wire.tell(add(1) + get() + LAST)) == [200] * 3


def test_the_usual_add_and_get_never_reach_a_handler(pair: Pair) -> None:
    """Otherwise these tests would compare the application with itself."""
    usual = get("u", namespace="eventual")
    pair.tell(usual + LAST)
    with pair.handled() as paths:
        for number in (1_000, 1_001):
            for namespace in ("default", "eventual", "quick"):
                pair.tell(add(number, counter="u", namespace=namespace) + LAST)
        pair.tell(usual * 2 + LAST)
        assert paths == []
        # A conflict is decided without its handler, too, and so is a late token.
        assert statuses(pair.tell(add(1_000, 5, counter="u") + LAST)) == [409, 200]
        assert paths == []
        pair.tell(add(1_002, 1, "idempotency-key: order-1", counter="u") + LAST)
        assert paths == ["POST u"]


def test_a_request_may_come_in_two_parts_cut_anywhere(pair: Pair) -> None:
    sent = add(1_100, counter="cut") + get("cut") + add(1_100, counter="cut") + LAST
    first = pair.tell(sent)
    assert statuses(first) == [200, 200, 200, 200]
    again = pair.tell(sent)
    for cut in range(1, len(sent)):
        assert pair.tell_one(pair.fast, sent[:cut], sent[cut:]) == again
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
#: Nothing is sent behind these: that could make the response to them get lost.
ENDS = st.sampled_from(
    [LAST, get("a", CLOSE), add(2_004, 1, CLOSE), request("GET", one("a"), version="1.0")]
)


#: The pair is the same for all examples: so are the requests sent to either.
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, suppress_health_check=FIXTURES)
@given(st.lists(PIECES, min_size=1, max_size=8), ENDS, st.data())
def test_any_sequence_of_requests_is_answered_like_the_application(
    pair: Pair, pieces: list[bytes], end: bytes, data: st.DataObject
) -> None:
    """Pipelined or not, cut anywhere."""
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
def test_a_batch_is_answered_like_the_models(pair: Pair, namespace: str) -> None:
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
        quick = pair.tell_one(pair.fast, sent)
        with patch("api.routes.items.read_batch", return_value=None):
            assert pair.tell_one(pair.plain, sent) == quick
    after = [Counter(each.service.tally) for each in pair.both]
    assert after[0] - before[0] == after[1] - before[1]


def adds_total(pair: Pair) -> dict[str, int]:
    """The adds in the metrics of the service with the fast lane."""
    text = pair.runner.run(pair.fast.tell(request("GET", "/metrics", CLOSE))).decode()
    found = re.findall(r'counter_adds_total\{outcome="(\w+)"\} (\d+)', text)
    return {outcome: int(number) for outcome, number in found}


def test_each_add_is_tallied_once_by_its_outcome(sqlite: Pair) -> None:
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


def test_a_body_over_a_limit_that_was_set_low_is_refused_alike(pair: Pair) -> None:
    body = add_body(3_500, time_us=pair.now_us())
    sent = post(f"{one()}/add", body.ljust(2_049), JSON)
    with ExitStack() as stack:
        for each in pair.both:
            pipeline = each.app.application.pipeline
            stack.enter_context(patch.object(pipeline, "body_bytes_max", 2_048))
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
        pair.advance(settling_time(pair.fast.app.application.settings.dataset()) + SECOND)
