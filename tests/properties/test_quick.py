"""What the quick reader of bodies takes, the models take too, and it means the same.

The other way round only the usual form must be taken: what else is valid may go the longer way.
"""

import json
import uuid
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.http.fast_json import read_add, read_batch, read_change, read_lines
from api.http.models import AddBody, BatchAddBody
from api.routes.items import token_of
from counter.clock import to_rfc3339
from counter.errors import CounterError
from counter.limits import COUNTER_NAME_CHARS_MAX, INT64_MAX, INT64_MIN, TIME_MAX_US, TIME_MIN_US
from counter.types import Event, Token

UUID = "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b"
TIME = "2026-01-31T08:15:30.000250Z"
TOKEN = f'{{"token":"{UUID}","generation_time":"{TIME}"}}'

deltas = st.integers(INT64_MIN, INT64_MAX)
nonces = st.binary(min_size=16, max_size=16)
times = st.integers(TIME_MIN_US, TIME_MAX_US)
names = st.text(st.characters(codec="utf-8", categories=("L", "M", "N", "P", "S")), min_size=1)


def is_name(text: str) -> bool:
    return len(text) <= COUNTER_NAME_CHARS_MAX and text.isprintable()


def dumped(value: Any, spaced: bool, *, escaped: bool = True) -> bytes:
    """*value* as one client or another writes JSON."""
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(value, separators=separators, ensure_ascii=escaped).encode()


def models_read_add(body: bytes, counter: str) -> Event | None:
    """The models' result for an add; None if they refuse it, or find no token."""
    try:
        add = AddBody.model_validate_json(body)
        return event_of(counter, add.delta, token_of(add.idempotency_token))
    except (ValidationError, CounterError):
        return None


def models_read_change(body: bytes) -> int | None:
    """The models' result for an add without its token; None if they refuse it."""
    try:
        add = AddBody.model_validate_json(body)
        token_of(add.idempotency_token)
        return add.delta
    except (ValidationError, CounterError):
        return None


def models_read_batch(body: bytes) -> list[Event | None] | None:
    """The models' result for a batch; None if they refuse any item."""
    try:
        return [
            event_of(each["counter"], each["delta"], token_of(each.get("idempotency_token")))
            for each in BatchAddBody.model_validate_json(body).items
        ]
    except (ValidationError, CounterError):
        return None


def event_of(counter: str, delta: int, token: Token | None) -> Event | None:
    return token and Event(counter, token.generation_time_us, token.nonce, 0, delta)


def check(body: bytes) -> None:
    """Hold the readers against the models, as an add of either kind and as a batch."""
    change = read_change(body)
    if change is not None:
        assert type(change) is int
        assert change == models_read_change(body)
    add = read_add(body, "c")
    if add is not None:
        assert type(add) is Event
        assert add == models_read_add(body, "c")
    batch = read_batch(body)
    if batch is not None:
        assert all(type(each) is Event for each in batch)
        assert batch == models_read_batch(body)


# Near misses, a place each: texts of JSON values that may stand there.
DELTAS = (
    *("1", "0", "-1", "-0", "01", "+1", "1.0", "1e2", "1E0", "-0.0", "1e400", "0x1", "1_000"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808"),
    *("-9223372036854775809", "18446744073709551617", "9223372036854775807.0", "1" * 400),
    *("true", "null", '"1"', "[]", "{}", "NaN", "Infinity", "-Infinity", "", "1 ", "\ufeff1"),
)
NONCES = (
    *(UUID, UUID.upper(), UUID.replace("-", ""), UUID[:-1], UUID + "0", "0" * 36, "-" * 36, ""),
    *(f"{{{UUID}}}", f"urn:uuid:{UUID}", UUID.replace("-", " "), UUID.replace("5f", "5 ")),
    *(UUID[:34] + "  ", UUID[:24] + "0c 5f 1d 2e ", UUID[:24] + "0c5f-1d2e3a4", "0-" * 16),
    *("0" * 30 + "  ", "00 " * 10 + "00", "00 " * 8 + "0" * 8, " " * 32, "\\t" + "0" * 31),
    *("0" * 31 + "\\u0030", "0" * 31 + "\\u0000", "0" * 31 + "\\ud800", "0" * 31 + "\uff11"),
    *("0" * 31 + "\u0663", "0" * 31 + "g", "0" * 31 + "\\n", "\\ud83d\\ude00" + "0" * 31),
    *("0" * 32 + "-", "0" * 32 + "----", "-" + UUID[:8] + UUID[9:], UUID[:-1] + "-"),
    *("0" * 31 + "\x00", "0" * 31 + "\\x", "0" * 31 + "\\u00", "0" * 31 + "\u2003"),
)
TIMES = (
    *(TIME, "2026-01-31T08:15:30Z", "2026-01-31t08:15:30z", "2026-01-31 08:15:30.1+05:30"),
    *("2026-01-31T08:15:30.000250z", "2026-01-31T08:15:30.000250+00:00", TIME[:-1], TIME + "Z"),
    *("2026-01-31T08:15:30.0002500Z", "2026-01-31T08:15:30.+00250Z", "2026-01-31T08:15:30.Z"),
    *("2026-01-31T24:00:00Z", "2026-01-31T23:59:60Z", "2026-01-31T08:15:60.000250Z"),
    *("2026-02-29T00:00:00Z", "2024-02-29T00:00:00Z", "2026-02-29T00:00:00.000000Z"),
    *("2026-01-31T08:15:30-24:00", "2026-01-31T08:15:30+23:59", "2026-01-31T08:15:30-00:00"),
    *("1999-12-31T23:59:59.999999Z", "2000-01-01T00:00:00.000000Z", "1900-01-01T00:00:00Z"),
    *("2200-01-01T00:00:00.000000Z", "2200-01-01T00:00:00.000001Z", "0001-01-01T00:00:00+23:59"),
    *("9999-12-31T23:59:59-23:59", "0000-01-01T00:00:00Z", "2026-W05-6T08:15:30Z", "20260131"),
    *("2026-01-31T08:15:30.00025\uff10Z", "2026-01-31T08:15:3\u0663.000250Z", TIME + "\\n", ""),
    *("2026-01-31T08:15:30.00025\\u0030Z", " " + TIME, TIME + " ", "2026-01-31T08:15:30.\\u0000Z"),
    *("2026-01-31T08:15:30,000250Z", "\uff12026-01-31T08:15:30.000250Z", "1769847330", TIME * 2),
)
NAMES = (
    *("c", "", "a b", "x" * 256, "x" * 257, "\u00e9" * 256, "\U0001f600" * 256, "\U0001f600" * 257),
    *("\\u0000", "\\n", "a\\u2028b", "\\ud800", "\\udc00\\ud800", "\\ud83d\\ude00", "\u200d"),
    *("\u200b", "\u202e", "a\\/b", "\\u0041", "\\ud83d", "\ufeff", "\u0663", "\x1f", "\u0378"),
)
KEYS = ("delta", "idempotency_token", "counter", "items", "\\u0064elta", "Delta", "x", "")
ENDS = (" ", "\n", "\x00", "x", "{}", ",", "]", "}", "\ufeff", "//", "/**/")

texts = st.sampled_from(NONCES + TIMES + NAMES).map(lambda text: f'"{text}"')
tokens = st.one_of(
    st.just(TOKEN),
    st.builds(
        '{{"token":"{}","generation_time":"{}"}}'.format,
        nonces.map(bytes.hex),
        times.map(to_rfc3339),
    ),
    st.sampled_from(NONCES).map(lambda text: f'{{"token":"{text}","generation_time":"{TIME}"}}'),
    st.sampled_from(TIMES).map(lambda text: f'{{"token":"{UUID}","generation_time":"{text}"}}'),
    st.sampled_from(["null", "{}", '""', f"[{TOKEN}]", TOKEN[:-1] + ',"x":1}', f'"{UUID}"']),
    st.sampled_from([f'{{"token":"{UUID}",{TOKEN[1:]}', f'{TOKEN[:-1]},"token":"{"0" * 32}"}}']),
)
deltas_near = st.sampled_from(DELTAS) | st.integers().map(str) | st.floats().map(json.dumps)
members = st.one_of(
    st.just(f'"idempotency_token":{TOKEN}'),
    st.just('"delta":1'),
    deltas_near.map('"delta":{}'.format),
    tokens.map('"idempotency_token":{}'.format),
    st.sampled_from(NAMES).map('"counter":"{}"'.format),
    st.builds('"{}":{}'.format, st.sampled_from(KEYS), deltas_near | tokens | texts),
)


def objects(members_min: int) -> st.SearchStrategy[str]:
    return st.lists(members, min_size=members_min, max_size=5).map(
        lambda found: "{" + ",".join(found) + "}"
    )


#: Objects that hold all that an add, or an item, needs, and more of the same, or other.
full = st.builds(
    '{{"delta":{},"idempotency_token":{}{}}}'.format,
    deltas_near,
    tokens,
    st.just("") | members.map(",{}".format),
)
items = st.builds(
    '{{"counter":"{}",{}'.format, st.sampled_from(NAMES), full.map(lambda text: text[1:])
)
batches = st.lists(items | full | objects(0), max_size=3).map(
    lambda found: '{"items":[' + ",".join(found) + "]}"
)
ends = st.just("") | st.sampled_from(ENDS)


@given(ends, full | objects(2) | batches, ends)
@example("\ufeff", f'{{"delta":1,"idempotency_token":{TOKEN}}}', "")
@example("", f'{{"delta":1,"delta":2,"idempotency_token":{TOKEN}}}', "")
@example("", f'{{"delta":1,"delta":"x","idempotency_token":{TOKEN}}}', "")
@example("", f'{{"delta":1,"idempotency_token":{TOKEN},"idempotency_token":null}}', "")
@example("", f'{{"delta":1,"idempotency_token":{TOKEN},"x":{"[" * 300}{"]" * 300}}}', "")
@example(
    "", f'{{"items":[],"items":[{{"counter":"c","delta":1,"idempotency_token":{TOKEN}}}]}}', ""
)
def test_a_nearly_valid_body_means_the_same_or_goes_to_the_models(
    start: str, body: str, end: str
) -> None:
    check(f"{start}{body}{end}".encode())


def good(*, delta: str = "1", nonce: str = UUID, time: str = TIME, name: str = "c") -> bytes:
    """A batch of one item with these parts."""
    token = f'{{"token":"{nonce}","generation_time":"{time}"}}'
    item = f'{{"counter":"{name}","delta":{delta},"idempotency_token":{token}}}'
    return f'{{"items":[{item}]}}'.encode()


def as_add(batch: bytes) -> bytes:
    """The only item of *batch* as the body of an add."""
    return batch.removeprefix(b'{"items":[').removesuffix(b"]}").replace(b'"counter":"c",', b"")


@pytest.mark.parametrize(
    ("part", "texts"), [("delta", DELTAS), ("nonce", NONCES), ("time", TIMES), ("name", NAMES)]
)
def test_each_near_miss_means_the_same_or_goes_to_the_models(
    part: str, texts: tuple[str, ...]
) -> None:
    for text in texts:
        body = good(**{part: text})
        check(body)
        check(as_add(body))


@given(st.binary(max_size=60), st.data())
def test_any_bytes_in_a_good_body(junk: bytes, data: st.DataObject) -> None:
    """Replace some of a good body's bytes, also within a character."""
    body = data.draw(st.sampled_from([good(), as_add(good()), good(name="\u00e9\U0001f600")]))
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, min(len(body), start + 8)))
    check(body[:start] + junk + body[end:])


@given(st.sampled_from([good(), as_add(good())]), st.data())
def test_one_byte_that_is_another(body: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(body) - 1))
    check(body[:place] + data.draw(st.binary(min_size=1, max_size=1)) + body[place + 1 :])


@given(deltas, nonces, times, st.booleans(), st.booleans())
@example(INT64_MIN, bytes(16), TIME_MIN_US, True, False)
@example(INT64_MAX, bytes(16), TIME_MAX_US, False, True)
def test_the_usual_add_is_taken(
    delta: int, nonce: bytes, time_us: int, dashes: bool, spaced: bool
) -> None:
    """Otherwise the quick parser could fall out of use unnoticed."""
    text = str(uuid.UUID(bytes=nonce)) if dashes else nonce.hex()
    token = {"token": text, "generation_time": to_rfc3339(time_us)}
    body = dumped({"delta": delta, "idempotency_token": token}, spaced)
    assert read_add(body, "c") == Event("c", time_us, nonce, 0, delta)
    assert read_change(body) == delta
    check(body)


@given(deltas, st.booleans(), st.booleans())
def test_the_usual_add_without_a_token_is_taken(delta: int, null: bool, spaced: bool) -> None:
    token = {"idempotency_token": None} if null else {}
    body = dumped({"delta": delta, **token}, spaced)
    assert read_change(body) == delta
    check(body)


@given(
    st.lists(st.tuples(names.filter(is_name), deltas, nonces, times), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_the_usual_batch_is_taken(
    adds: list[tuple[str, int, bytes, int]], escaped: bool, spaced: bool
) -> None:
    body = dumped(
        {
            "items": [
                {
                    "counter": name,
                    "delta": delta,
                    "idempotency_token": {
                        "token": nonce.hex(),
                        "generation_time": to_rfc3339(time_us),
                    },
                }
                for name, delta, nonce, time_us in adds
            ]
        },
        spaced,
        escaped=escaped,
    )
    assert read_batch(body) == [
        Event(name, time_us, nonce, 0, delta) for name, delta, nonce, time_us in adds
    ]
    check(body)


ITEM = f'{{"counter":"c","delta":1,"idempotency_token":{TOKEN}}}'
#: Whole items, their parts, and joints of two of them.
pieces = st.one_of(
    st.just(ITEM),
    st.integers(1, len(ITEM) - 1).flatmap(lambda at: st.sampled_from((ITEM[:at], ITEM[at:]))),
    st.sampled_from(
        ("{", "}", "[", "]", "{}", '{"items":[', ",", ":", '"', " ", "\t", "\\", "null")
    ),
)


@given(st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), max_size=4))
@example([ITEM, ITEM])
@example([f"{ITEM} {ITEM}", ITEM[:40], ITEM[40:]])
@example([ITEM[:-1], f"}}{ITEM}"])
@example([f"{ITEM}{ITEM}", "{}"])
def test_lines_read_together_mean_the_same_one_by_one(texts: list[str]) -> None:
    lines = [text.strip().encode() for text in texts if text.strip()]
    events = read_lines(lines)
    if events is not None:
        found = [models_read_batch(b'{"items":[%s]}' % line) for line in lines]
        assert [[each] for each in events] == found
    elif all(line == ITEM.encode() for line in lines):
        pytest.fail("the usual form is not taken")
