"""Any request, valid by the OpenAPI document or not: only documented responses. Each run tries the
same; `FUZZ_EXAMPLES=2000 FUZZ_SEED=7 ./scripts/test tests/http/test_fuzz.py --timeout=0` tries
more."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.app import App
from tests.support.problems import problem_of
from tests.support.rest import Rest
from tests.support.times import HOUR, SECOND, rfc3339

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NAMESPACE = "/v1/namespaces/{namespace}"
COUNTER = f"{NAMESPACE}/counters/{{counter}}"
HOLD = f"{NAMESPACE}/holds/{{hold}}"
OPERATIONS = (
    *(("POST", f"{COUNTER}/{each}") for each in ("add", "add-and-get", "clear", "recount")),
    *(("GET", f"{COUNTER}{each}") for each in ("", "/events", "/history", "/live")),
    ("DELETE", COUNTER),
    *(("POST", f"{NAMESPACE}/{each}") for each in ("batch/add", "batch/get", "atomic/add")),
    *(("POST", f"{NAMESPACE}/{each}") for each in ("events", "api/v1/events")),
    *(("POST", f"{NAMESPACE}/{each}/cancel") for each in ("batch", "atomic", "events")),
    *(("POST", f"{COUNTER}/{each}") for each in ("cancel", "holds")),
    *(("GET", f"{NAMESPACE}/holds"), ("GET", HOLD), ("PATCH", HOLD)),
    *(("POST", f"{HOLD}/{each}") for each in ("settle", "release")),
    *(
        ("GET", f"{NAMESPACE}{each}")
        for each in ("", "/counters", "/shards", "/busiest", "/metrics")
    ),
    *(("PUT", NAMESPACE), ("DELETE", NAMESPACE), ("GET", "/v1/namespaces")),
    *(("GET", f"/v1/{each}") for each in ("outcomes", "overview", "search")),
    ("POST", "/v1/tokens"),
    *(("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/{key}")),
    *(("GET", f"/{each}") for each in ("healthz", "readyz", "metrics", "problems")),
)
#: One of each kind, and one that comes and goes.
KINDS = {"default": None, "eventual": "EVENTUAL", "best": "BEST_EFFORT", "spare": "ACCURATE"}
#: On time, voided long ago, and not there yet.
AGES = st.sampled_from([0, 0, 0, SECOND, HOUR, -HOUR])
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

FUZZ = settings(
    max_examples=EXAMPLES,
    database=None,
    # A failure that is not made smaller is still the same every time, and is found sooner.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


class Desk:
    """A service that all examples of this module share, and its own document."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.app = App("sqlite", directory)
        self.runner.run(self.app.start())
        # Else nothing here would hear the end of it.
        self.app.application.live.stream_s = 0
        self.document = self.runner.run(self.app.http.get("/openapi.json")).json()
        self.schema = schemathesis.openapi.from_dict(self.document)

    def close(self) -> None:
        self.runner.run(self.app.stop())
        self.runner.close()

    async def prepare(self) -> None:
        """Have the namespaces there, whatever the example before did to them."""
        for name, kind in KINDS.items():
            if kind is not None:
                await Rest(self.app.http, name).create(kind)

    def cases(self, method: str, path: str, mode: GenerationMode) -> st.SearchStrategy[Case[Any]]:
        """Requests that fit the document, or that do not."""
        return self.schema[path][method].as_strategy(generation_mode=mode)

    def send(self, case: Case[Any]) -> httpx.Response:
        """The response to *case*, byte for byte as a client would have sent it."""
        made = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
        note(f"{made.method} {made.url} {made.headers} {made.body!r}")

        async def ask() -> httpx.Response:
            await self.prepare()
            return await self.app.http.request(
                made.method or "",
                made.url or "",
                headers=dict(made.headers),  # type: ignore[arg-type]  # bytes, or text: both go
                content=made.body,  # type: ignore[arg-type]  # never a stream
            )

        return self.runner.run(ask())


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("fuzz"))
    yield desk
    desk.close()


def test_every_operation_of_the_document_is_tried(desk: Desk) -> None:
    described = {
        (method.upper(), path)
        for path, operations in desk.document["paths"].items()
        for method in operations
    }
    assert described == set(OPERATIONS)


def aim(desk: Desk, case: Case[Any], data: st.DataObject) -> None:
    """Have most requests come as far as the service: to a namespace that is there, on time."""
    mostly, perhaps = st.integers(0, 7).map(lambda drawn: drawn < 7), st.booleans()
    where = case.path_parameters
    if where and "namespace" in where and data.draw(mostly):
        removes = case.method == "DELETE"
        where["namespace"] = "spare" if removes else data.draw(st.sampled_from(list(KINDS)))
    if where and "counter" in where and data.draw(mostly):
        where["counter"] = data.draw(st.sampled_from(["c", "ü/🙂", "%"]))
    if case.headers and "Idempotency-Key" in case.headers and data.draw(perhaps):
        del case.headers["Idempotency-Key"]
    if isinstance(case.body, dict) and case.method == "POST":
        items = case.body.get("items")
        for holder in (case.body, *(items if isinstance(items, list) else ())):
            if isinstance(holder, dict) and "idempotency_token" in holder and data.draw(mostly):
                holder["idempotency_token"] = {
                    "token": f"{data.draw(st.integers(0, 9)):032}",
                    "generation_time": rfc3339(desk.app.clock.now_us() - data.draw(AGES)),
                }


def tried(mode: GenerationMode) -> list[tuple[str, str]]:
    """The operations with parameters: others cannot be wrong."""
    return [each for each in OPERATIONS if mode.is_positive or "{" in each[1] or "POST" in each]


@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [(mode, *each) for mode in GenerationMode for each in tried(mode)],
    ids=lambda part: part,
)
def test_every_response_is_in_the_document(
    desk: Desk, mode: GenerationMode, method: str, path: str
) -> None:
    @FUZZ
    @seed(SEED)
    @given(st.data())
    def tries(data: st.DataObject) -> None:
        case = data.draw(desk.cases(method, path, mode))
        aim(desk, case, data)
        answer = desk.send(case)
        note(f"{answer.status_code} {answer.text[:500]} (FUZZ_SEED={SEED})")
        # 501 is what a BEST_EFFORT namespace does not support.
        assert answer.status_code < 500 or answer.status_code == 501
        if answer.status_code >= 400:
            problem_of(answer)
        case.validate_response(answer, checks=CHECKS)

    tries()
