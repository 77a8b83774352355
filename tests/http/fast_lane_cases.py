"""Requests to adds and gets, usual and odd, and the statuses that answer them.

Each is sent on a connection of its own, with a last request behind it that ends the connection.
"""

import gzip

from tests.support.bytes_on_wire import CLOSE, JSON, add, add_body, get, one, post, request
from tests.support.rest import uuid7
from tests.support.times import MINUTE, SECOND, START_US

ADD = f"{one()}/add"
LONG = "x" * 256
KEYED = b'{"delta": 1}'
BAD_TOKEN = b'{"delta": 1, "idempotency_token": {"token": "1", "generation_time": "now"}}'
BODY_MAX = 1024 * 1024

#: The preface of clients that would like to speak HTTP/2.
H2C = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAA")
KEY = "idempotency-key: h2c"
CHUNKED = b'9\r\n{"delta":\r\n2\r\n1}\r\n0\r\n\r\n'

Cases = dict[str, tuple[bytes, list[int]]]

FORMS: Cases = {
    "add": (add(1), [200]),
    "get": (get(), [200]),
    "get-of-an-unknown-counter": (get("missing"), [200]),
    "replay": (add(2) * 3, [200, 200, 200]),
    "conflict": (add(3) + add(3, 2) + add(3), [200, 409, 200]),
    "late": (add(4, time_us=START_US - MINUTE) * 2, [410, 410]),
    "ahead": (add(5, time_us=START_US + MINUTE), [400]),
    "a-little-ahead": (add(6, time_us=START_US + SECOND) + get(), [200, 200]),
    "unknown-namespace": (add(7, namespace="no") + get(namespace="no"), [404, 404]),
    "no-namespace": (
        add(8, namespace="No") + get(namespace="") + get(namespace="x" * 99),
        [404] * 3,
    ),
    "eventual": (add(9, namespace="eventual") + get(namespace="eventual") * 2, [200] * 3),
    "best-effort": (add(10, namespace="quick") * 2 + get(namespace="quick"), [200] * 3),
    "best-effort-without-token": (
        post(f"{one(namespace='quick')}/add", KEYED, JSON) + get(namespace="quick"),
        [200, 200],
    ),
    "best-effort-with-a-token-that-is-none": (
        post(f"{one(namespace='quick')}/add", b'{"delta": 1, "idempotency_token": null}', JSON)
        + post(f"{one(namespace='quick')}/add", BAD_TOKEN, JSON)
        + get(namespace="quick"),
        [200, 400, 200],
    ),
    "fast-then-not": (
        add(11) + request("GET", "/v1/namespaces") + get("c?max_staleness=0s"),
        [200] * 3,
    ),
    "not-then-fast": (request("GET", "/v1/namespaces") + add(12) + get(), [200] * 3),
    "two-fast-ones": (add(13, counter="a") + add(14, counter="b") + get("a") + get("b"), [200] * 4),
    "many": (b"".join(add(number) + get() for number in range(20, 40)), [200] * 40),
    "nanoseconds": (
        post(ADD, add_body(17).replace(b'Z"', b'999Z"'), JSON) + add(17) + add(17, 2) + get(),
        [200, 200, 409, 200],
    ),
    "blank-lines-between": (add(15) + b"\r\n" + get() + b"\r\n\n" + add(16), [200] * 3),
}

HEADS: Cases = {
    "http-1.0": (request("GET", one(), version="1.0"), [200]),
    "http-1.0-kept": (request("GET", one(), "connection: keep-alive", version="1.0"), [200]),
    "http-1.0-add": (post(ADD, add_body(100), JSON, version="1.0"), [200]),
    "add-and-close": (add(101, 1, CLOSE), [200]),
    "get-and-close": (get("c", CLOSE), [200]),
    "get-and-close-in-capitals": (get("c", "Connection: CLOSE"), [200]),
    "what-follows-a-close": (get("c", CLOSE) + add(102), [200]),
    "what-follows-an-add-and-close": (add(103, 1, CLOSE) + add(104), [200]),
    "kept-explicitly": (add(105, 1, "connection: keep-alive") + get(), [200, 200]),
    "no-host": (get().replace(b"host:", b"x-host:"), [400]),
    "no-host-in-an-add": (add(131).replace(b"host:", b"x-host:"), [400]),
    "no-host-on-another-route": (b"GET /healthz HTTP/1.1\r\n\r\n", [400]),
    "no-host-with-an-upgrade": (get("c", *H2C).replace(b"host:", b"x-host:"), [400]),
    "no-host-in-http-1.0": (b"GET /healthz HTTP/1.0\r\n\r\n", [200]),
    "no-host-in-an-add-of-http-1.0": (
        post(ADD, add_body(132), JSON, version="1.0").replace(b"host: localhost\r\n", b""),
        [200],
    ),
    "empty-host": (get().replace(b"host: localhost", b"host:"), [403]),
    "two-hosts": (get("c", "host: localhost"), [400]),
    "two-hosts-in-an-add": (add(133, 1, "host: localhost"), [400]),
    "two-hosts-in-http-1.0": (request("GET", one(), "host: localhost", version="1.0"), [400]),
    "malformed-host": (get().replace(b"localhost", b"local host"), [400]),
    "malformed-host-in-an-add": (add(134).replace(b"localhost", b"localhost/x"), [400]),
    "raw-host": (get().replace(b"localhost", b"l\xc3\xb6calhost"), [400]),
    "hosts-with-ports": (
        get().replace(b"localhost", b"[::1]:80") + add(135).replace(b"localhost", b"127.0.0.1:80"),
        [200, 200],
    ),
    "expect": (add(106, 1, "expect: 100-continue"), [100, 200]),
    "expect-something": (add(107, 1, "expect: a miracle"), [200]),
    "chunked": (
        request(
            "POST",
            ADD,
            JSON,
            "transfer-encoding: chunked",
            body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(add_body(108)), add_body(108)),
        ),
        [200],
    ),
    "chunked-too-large": (
        request(
            "POST",
            ADD,
            JSON,
            "transfer-encoding: chunked",
            body=b"%x\r\n%s\r\n0\r\n\r\n" % (BODY_MAX + 1, add_body(122).ljust(BODY_MAX + 1)),
        ),
        [413],
    ),
    "chunked-get": (
        request("GET", one(), "transfer-encoding: chunked", body=b"1\r\nx\r\n0\r\n\r\n"),
        [200],
    ),
    "head": (request("HEAD", one()), [200]),
    "head-of-add": (request("HEAD", ADD), [405]),
    "get-of-add": (request("GET", ADD), [405]),
    "post-of-counter": (post(one(), add_body(109), JSON), [405]),
    "put-delete": (request("PUT", one()) + request("DELETE", one()), [405, 400]),
    "options": (request("OPTIONS", one()), [405]),
    "get-with-a-body": (request("GET", one(), "content-length: 5", body=b"hello"), [200]),
    "get-with-an-add-as-body": (
        request("GET", one(), JSON, f"content-length: {len(add_body(110))}", body=add_body(110)),
        [200],
    ),
    "upgrade-get": (get("c", *H2C, CLOSE) + get(), [200]),
    "upgrade-get-and-another": (get("c", *H2C) + get("c", *H2C) + get(), [200] * 3),
    "upgrade-add": (add(111, 1, *H2C) + add(111, 2, *H2C) + get(), [200, 409, 200]),
    "upgrade-put-delete": (
        request("PUT", one(), *H2C) + request("DELETE", one(), *H2C, JSON, KEY),
        [405, 200],
    ),
    "upgrade-chunked": (
        request("POST", ADD, *H2C, JSON, KEY, "transfer-encoding: chunked", body=CHUNKED) + get(),
        [200, 200],
    ),
    "upgrade-expect": (add(123, 1, *H2C, "expect: 100-continue") + get(), [100, 200, 200]),
    "upgrade-1.0": (request("GET", one(), *H2C, version="1.0"), [200]),
    "upgrade-health": (request("GET", "/healthz", *H2C) + get(), [200, 200]),
    "upgrade-websocket": (
        get("c", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
        + get("c", "connection: upgrade", "upgrade: TLS/1.2")
        + get("c", "connection: upgrade", "upgrade: h2c", "upgrade: x"),
        [200] * 3,
    ),
    "upgrade-without-connection": (add(112, 1, "upgrade: h2c") + get("c", "upgrade: x"), [200] * 2),
    "upgrade-two-lengths": (add(124, 1, *H2C, "content-length: 5"), [400]),
    "upgrade-length-and-chunked": (add(125, 1, *H2C, "transfer-encoding: chunked"), [400]),
    "upgrade-gzip": (
        add(126, 1, *H2C).replace(b"content-length:", b"transfer-encoding: gzip\r\nx:"),
        [501],
    ),
    "connect": (request("CONNECT", "localhost:80"), [400]),
    "connect-with-a-body": (request("CONNECT", "localhost:80", *H2C, "content-length: 5"), [400]),
    "many-headers": (add(113, 1, *(f"x-{number}: y" for number in range(90))), [200]),
    "too-many-headers": (add(113, 1, *["a:"] * 100), [431]),
    "no-length": (request("POST", ADD, JSON), [400]),
    "length-with-spaces": (request("GET", one(), "content-length:   0  "), [200]),
    "content-type-charset": (post(ADD, add_body(114), f"{JSON}; charset=utf-8"), [200]),
    "content-type-capitals": (post(ADD, add_body(115), "Content-Type: Application/JSON"), [200]),
    "compressed": (
        post(ADD, gzip.compress(add_body(127)), JSON, "content-encoding: gzip")
        + post(ADD, add_body(127), JSON, "content-encoding: br")
        + post(ADD, add_body(127), JSON, "content-encoding: identity", "content-encoding: gzip")
        + post(ADD, gzip.compress(bytes(2**24)), JSON, "Content-Encoding: GZIP, identity")
        + post(ADD, add_body(127), JSON, "content-encoding: identity", "content-encoding:"),
        [415, 415, 415, 415, 200],
    ),
    "compressed-get": (get("c", "content-encoding: gzip"), [200]),
    "content-type-missing": (post(ADD, add_body(116)), [415]),
    "content-type-empty": (post(ADD, add_body(117), "content-type:"), [415]),
    "content-type-other": (post(ADD, add_body(118), "content-type: text/plain"), [415]),
    "content-type-twice": (
        post(ADD, add_body(119), "content-type: text/plain", JSON)
        + post(ADD, add_body(120), JSON, "content-type: text/plain")
        + post(ADD, add_body(121), JSON, JSON),
        [415, 200, 200],
    ),
}
PATHS: Cases = {
    name: (request("GET", path) + post(f"{path}/add", add_body(200 + number), JSON), found)
    for number, (name, path, found) in enumerate(
        [
            ("encoded-letter", one("%63"), [200, 200]),
            ("encoded-slash", one("a%2Fb"), [200, 200]),
            ("encoded-nothing", one("a%"), [200, 200]),
            ("encoded-line", one("a%0Ab"), [400, 400]),
            ("encoded-namespace", one(namespace="%64efault"), [404, 404]),
            ("dot", one("."), [200, 200]),
            ("dots", one(".."), [200, 200]),
            ("marks", one("a.b_c~d:e@f-g"), [200, 200]),
            ("other-marks", one("a+b!c'(d)*,;=$&"), [200, 200]),
            ("braces", one("{c}|^`"), [200, 200]),
            ("quote", one('"c"'), [200, 200]),
            ("empty-name", one(""), [400, 400]),
            ("long", one(LONG), [200, 200]),
            ("too-long-a-name", one(LONG + "x"), [400, 400]),
            ("named-add", one("add"), [200, 200]),
            ("query", one("c?max_staleness=0s"), [200, 405]),
            ("empty-query", one("c?"), [200, 405]),
            ("fragment", one("c#x"), [200, 405]),
            ("query-in-the-namespace", one(namespace="default?x=1"), [200, 405]),
            ("fragment-in-the-namespace", one(namespace="default#x"), [200, 405]),
            ("slash-at-the-end", one("c/"), [404, 404]),
            ("two-slashes", one("/c"), [404, 404]),
            ("two-slashes-before", "/" + one(), [404, 404]),
            ("star-before", "*" + one(), [404, 404]),
            ("with-a-host", "http://localhost" + one(), [200, 200]),
            ("other-version", one().replace("/v1/", "/v2/"), [404, 404]),
            ("encoded-version", one().replace("/v1/", "/%761/"), [200, 200]),
            ("capitals", one().replace("counters", "Counters"), [404, 404]),
        ]
    )
}

KEYS: Cases = {
    name: (post(ADD, body, JSON, *(f"idempotency-key: {key}" for key in keys)) * 2 + get(), found)
    for name, body, keys, found in [
        ("bare", KEYED, ["order-1"], [200, 200, 200]),
        ("quoted", KEYED, ['"order-1"'], [200, 200, 200]),
        ("quoted-with-parameters", KEYED, ['"order-1";v=1; w="a;\\"b"'], [200, 200, 200]),
        ("joined-by-a-proxy", KEYED, ["order-1, order-1"], [400, 400, 200]),
        ("quoted-and-joined-by-a-proxy", KEYED, ['"order-1", "order-1"'], [400, 400, 200]),
        ("uuid7", KEYED, [uuid7(START_US, tail=1)], [200, 200, 200]),
        ("late-uuid7", KEYED, [uuid7(START_US - MINUTE, tail=2)], [410, 410, 200]),
        ("uuid4", KEYED, ["5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b"], [200, 200, 200]),
        ("with-a-token-too", add_body(300), ["order-2"], [400, 400, 200]),
        ("twice", KEYED, ["order-3", "order-3"], [400, 400, 200]),
        ("twice-with-a-token", add_body(301), ["a", "b"], [400, 400, 200]),
        ("empty-key", KEYED, [""], [400, 400, 200]),
        ("empty-with-a-token", add_body(302), [""], [400, 400, 200]),
        ("too-long-a-key", KEYED, ["x" * 256], [400, 400, 200]),
        ("none", KEYED, [], [400, 400, 200]),
    ]
}

BODIES: Cases = {
    f"body-{name}": (post(ADD, body, JSON) + get(), found)
    for name, body, found in [
        ("empty", b"", [400, 200]),
        ("object", b"{}", [400, 200]),
        ("words", b"not json", [400, 200]),
        ("list", b"[]", [400, 200]),
        ("bytes", b"\xff\xfe\x00", [400, 200]),
        ("mark", b"\xef\xbb\xbf" + add_body(400), [200, 200]),
        ("two-marks", 2 * b"\xef\xbb\xbf" + add_body(400), [400, 200]),
        ("more", add_body(401) + b"x", [400, 200]),
        ("float", add_body(402).replace(b": 1", b": 1.0"), [400, 200]),
        ("huge-delta", add_body(403, 2**63), [400, 200]),
        ("largest-delta", add_body(404, 2**63 - 1), [200, 200]),
        ("and-back", add_body(405, 1 - 2**63), [200, 200]),
        ("zero-delta", add_body(406, 0), [200, 200]),
        ("other-field", add_body(407).replace(b"{", b'{"x": 1, ', 1), [400, 200]),
        ("null-token", b'{"delta": 1, "idempotency_token": null}', [400, 200]),
        ("no-nonce", add_body(408).replace(b"-", b" "), [400, 200]),
        ("no-time", add_body(409).replace(b"T12", b"T25"), [400, 200]),
        ("time-out-of-bounds", add_body(410, 1, 0), [400, 200]),
        ("padded", add_body(411).ljust(65_536), [200, 200]),
        ("padded-more", add_body(412).ljust(65_537), [200, 200]),
        ("padded-most", add_body(413).ljust(BODY_MAX), [200, 200]),
        ("too-large", add_body(414).ljust(BODY_MAX + 1), [413, 200]),
    ]
}

CASES: Cases = {**FORMS, **HEADS, **PATHS, **KEYS, **BODIES}
