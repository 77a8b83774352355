"""What operators and newcomers find beside the counters."""

import re

import pytest

from tests.support.app import App
from tests.support.rest import Rest, fresh


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"])
async def test_it_is_there(rest: Rest, path: str) -> None:
    answer = await rest.http.get(path)
    assert answer.status_code == 200, answer.text


ROUTES = (
    "put /v1/namespaces/{ns}",
    "get /v1/namespaces/{ns}",
    "delete /v1/namespaces/{ns}",
    "get /v1/namespaces",
    "post /v1/namespaces/{ns}/counters/{c}/add",
    "post /v1/namespaces/{ns}/counters/{c}/add-and-get",
    "post /v1/namespaces/{ns}/counters/{c}/clear",
    "get /v1/namespaces/{ns}/counters/{c}",
    "get /v1/namespaces/{ns}/counters/{c}/events",
    "get /v1/namespaces/{ns}/counters/{c}/history",
    "post /v1/namespaces/{ns}/counters/{c}/recount",
    "get /v1/namespaces/{ns}/counters",
    "post /v1/namespaces/{ns}/batch/add",
    "post /v1/namespaces/{ns}/batch/get",
    "post /v1/namespaces/{ns}/atomic/add",
    "post /v1/tokens",
)


async def test_every_route_is_in_the_document_with_an_example(rest: Rest) -> None:
    document = (await rest.http.get("/openapi.json")).json()
    described = {
        f"{method} {re.sub(r'{[^}]*}', '{}', path)}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    for route in ROUTES:
        operation = described.get(re.sub(r"{[^}]*}", "{}", route))
        assert operation is not None, f"{route} is not documented"
        assert operation.get("summary") or operation.get("description"), route
        assert "example" in str(operation) or "$ref" in str(operation), f"{route}: no example"
        assert {"200", "201", "202", "204"} & operation["responses"].keys(), route


async def test_metrics_count_what_was_done(rest: Rest, app: App) -> None:
    await rest.add("c", 1, fresh(app.clock.now_us()))
    text = (await rest.http.get("/metrics")).text
    assert "# TYPE" in text
    assert re.search(r"^\w*add\w*{?.*} [1-9]", text, re.MULTILINE), text


async def test_it_is_not_ready_where_the_store_cannot_write(rest: Rest, app: App) -> None:
    from tests.support.app import store_that_fails

    with store_that_fails(app, "ping"):
        answer = await rest.http.get("/readyz")
        assert answer.status_code == 503
        assert (await rest.http.get("/healthz")).status_code == 200
