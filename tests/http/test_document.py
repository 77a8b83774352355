"""The OpenAPI document: made once, small, and with examples that are as it says."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import httpx
import pytest
from jsonschema import Draft202012Validator

from api.document.openapi import document_of
from api.document.problem_page import problems_page
from api.routes.site import site_of
from tests.support.rest import Rest

BYTES_MAX = 130_000
LOOK = """
import sys
import counter.cli.app
late = ("fastapi", "starlette", "opentelemetry")
print(sorted(each for each in late if each in sys.modules))
import api.serve, counter.cli.commands.serve
late = ("opentelemetry.sdk", "opentelemetry.exporter", "httpx", "counter_client")
print(sorted(each for each in late if each in sys.modules))
"""


@pytest.fixture
def storage() -> str:
    """Nothing here depends on the store."""
    return "memory"


@pytest.fixture
async def document(rest: Rest) -> Any:
    return (await rest.http.get("/openapi.json")).json()


@pytest.mark.usefixtures("child_processes")
def test_a_start_loads_nothing_that_it_does_not_use() -> None:
    """The command line loads no framework; a server nothing that only traces or clients need."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


async def test_the_first_readers_may_come_at_once_and_one_may_leave() -> None:
    transport = httpx.ASGITransport(site_of((), Mock(), Mock(), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        readers = [asyncio.create_task(http.get("/openapi.json")) for _ in range(3)]
        await asyncio.sleep(0)
        readers[0].cancel()
        answers = await asyncio.gather(*readers[1:], http.get("/problems"))
    assert [each.status_code for each in answers] == [200, 200, 200]


async def test_the_document_is_generated_once() -> None:
    """It takes as long as hundreds of adds, and a reader needs no key."""
    with (
        patch("api.routes.site.document_of", side_effect=document_of) as made,
        patch("api.routes.site.problems_page", side_effect=problems_page) as shown,
    ):
        transport = httpx.ASGITransport(site_of((), Mock(), Mock(), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            documents = [await http.get("/openapi.json") for _ in range(3)]
            pages = [await http.get("/problems") for _ in range(3)]
    assert documents[0].json()["openapi"] >= "3.1"
    assert documents[0].headers["content-type"] == "application/json"
    assert len({each.content for each in (*documents, *pages)}) == 2
    assert (made.call_count, shown.call_count) == (1, 1)


def test_the_document_is_small(document: Any) -> None:
    assert len(json.dumps(document)) < BYTES_MAX


def test_operations_have_names_tags_examples_and_required_scopes(document: Any) -> None:
    operations = {each["operationId"]: each for _, each in operations_of(document)}
    assert {"addToCounter", "getCounter", "batchAdd", "batchGet", "clearCounter"} <= set(operations)
    tags = {each["name"] for each in document["tags"]}
    for path, each in operations_of(document):
        assert each["summary"] or each["description"]
        assert "example" in str(each) or "$ref" in str(each) or not path.startswith("/v1/")
        assert {"200", "201", "202", "204"} & each["responses"].keys()
        assert set(each["tags"]) <= tags
        assert "422" not in each["responses"]
        assert bool(each["security"]) == (path.startswith("/v1/") or path == "/metrics")
    assert operations["addToCounter"]["security"] == [{"key": ["write"]}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_every_reference_leads_somewhere(document: Any) -> None:
    found = list(references(document))
    assert len(found) > 100
    for each in found:
        resolved(document, each)


def test_every_example_is_as_its_schema_says(document: Any) -> None:
    components = document["components"]
    checked = 0
    for name, schema in components["schemas"].items():
        validator = validator_of(document, f"#/components/schemas/{name}")
        for each in schema.get("examples", ()):
            validator.validate(each)
            checked += 1
    problem = validator_of(document, "#/components/schemas/Problem")
    for response in components["responses"].values():
        (content,) = response["content"].values()
        for code, each in content["examples"].items():
            problem.validate(each["value"])
            assert each["value"]["code"] == code
            checked += 1
    assert checked > 50


def test_every_problem_shows_its_own_status(document: Any) -> None:
    for _, operation in operations_of(document):
        for status, response in operation["responses"].items():
            if status >= "400":
                shown = resolved(document, response["$ref"])["content"]["application/problem+json"]
                found = {each["value"]["status"] for each in shown["examples"].values()}
                assert found == {int(status)}


def operations_of(document: Any) -> Iterator[tuple[str, Any]]:
    for path, operations in document["paths"].items():
        for each in operations.values():
            yield path, each


def references(part: Any) -> Iterator[str]:
    for each in part.values() if isinstance(part, dict) else part:
        if isinstance(each, dict | list):
            yield from references(each)
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"]


def resolved(document: Any, reference: str) -> Any:
    found = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def validator_of(document: Any, reference: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": reference, "components": document["components"]})
