"""HEAD is GET without the body (RFC 9110, 9.3.2)."""

import pytest

from tests.support.app import App
from tests.support.rest import Rest, fresh

#: Else each response has a name of its own.
ID = {"X-Request-Id": "the-same"}
SERVICE = ("/healthz", "/readyz", "/metrics", "/problems", "/docs", "/openapi.json")
PATHS = (
    "/v1/namespaces",
    "/v1/namespaces/default",
    "/v1/namespaces/default/counters",
    "/v1/namespaces/default/shards",
    "/v1/namespaces/default/busiest",
    "/v1/namespaces/default/metrics",
    "/v1/outcomes",
    "/v1/overview",
    "/v1/search?q=c",
    "/console",
    "/v1/namespaces/default/counters/c/events",
    "/v1/namespaces/default/counters/c/history?step=1d",
    "/v1/namespaces/none/counters/c",
    "/nothing/here",
    *SERVICE,
)


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


@pytest.mark.parametrize("path", PATHS)
async def test_head_has_the_head_of_a_get_and_no_body(rest: Rest, app: App, path: str) -> None:
    await rest.add("c", 1, fresh(app.clock.now_us()))
    get, head = await rest.http.get(path, headers=ID), await rest.http.head(path, headers=ID)
    assert head.status_code == get.status_code
    if path == "/metrics":
        # It counts the first of the two.
        del head.headers["content-length"], get.headers["content-length"]
    assert head.headers == get.headers
    assert get.content
    assert not head.content


async def test_the_count_of_a_counter_has_a_head(rest: Rest) -> None:
    """Its body differs from one moment to the next, and its length does not."""
    path = rest.path("c")
    get, head = await rest.http.get(path, headers=ID), await rest.http.head(path, headers=ID)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == get.headers


async def test_a_route_without_get_has_no_head(rest: Rest) -> None:
    answer = await rest.http.head(rest.path("c", "add"))
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert not answer.content


@pytest.mark.parametrize("path", ["/v1/namespaces/default/counters/c", "/readyz"])
async def test_allow_names_it_beside_get(rest: Rest, path: str) -> None:
    answer = await rest.http.put(path)
    assert answer.status_code == 405
    assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", "))
