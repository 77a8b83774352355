"""The reference of the HTTP API: every route of the service's own OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from api.app import create_app
from api.document.openapi import document_of
from api.http.models import DurationOut
from api.http.problems import problem_types
from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.limits import INT64_MAX, INT64_MIN
from counter.storage.memory import MemoryStore

Schema = Mapping[str, Any]

_HEAD: Final = """# HTTP, every route

Every route, from the OpenAPI document that each service has at `/openapi.json`; its page `/docs`
can send requests. [HTTP, by example](../http.md) shows each route in use. If the service requires
keys, a route needs one of the named scope or a wider one: `read`, `write`, `admin`. Every answer
that is not 2xx is a [problem](errors.md).

| route | what it does |
|---|---|
"""
_DURATION: Final = TypeAdapter(DurationOut).json_schema()["pattern"]
_FORMS: Final[Mapping[str, str]] = {"date-time": "RFC 3339 time", "uuid": "UUID"}
#: The keys of a minimum and a maximum, and the unit.
_BOUNDS: Final = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
)
#: Levels of nested objects that are listed; examples show deeper ones.
_DEPTH_MAX: Final = 4


class Defaults(Settings):
    """Settings that ignore files and variables of the machine that builds this."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def openapi() -> Mapping[str, Any]:
    """Return the service's document of all routes."""
    settings, clock = Defaults(), SystemClock()
    store = MemoryStore(clock, (settings.dataset(),))
    return document_of(create_app(settings, store=store, clock=clock).site)


def routes_page() -> str:
    """The page, in Markdown."""
    document = openapi()
    document = _inlined(document, document["components"])
    found = {
        f"{method.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    listed = [f"| [`{name}`](#{anchor(name)}) | {found[name]['summary']} |" for name in found]
    sections = [_section(name, each) for name, each in found.items()]
    problem = document["components"]["schemas"]["Problem"]
    return _HEAD + "\n".join([*listed, "", *sections, *_problems(problem)])


def anchor(name: str) -> str:
    """The anchor of the route *name*, such as ``get-v1-namespaces-ns``."""
    words = "".join(each if each.isalnum() else " " for each in name.lower()).split()
    return "-".join(words)


def _inlined(part: Any, components: Schema) -> Any:
    """Return *part* with its references resolved."""
    if isinstance(part, list):
        return [_inlined(each, components) for each in part]
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("$ref"), str):
        _, _, kind, name = part["$ref"].split("/")
        return _inlined({**components[kind][name], **part, "$ref": None}, components)
    return {key: _inlined(each, components) for key, each in part.items()}


def _section(name: str, operation: Schema) -> str:
    label = name.replace("/v1/namespaces/{namespace}/", "…/")
    heading = f'## `{name}` {{ #{anchor(name)} data-toc-label="{label}" }}'
    parts = [heading, f"{operation['summary']}."]
    if taken := operation.get("security"):
        parts.append(f"Scope: `{taken[0]['key'][0]}`.")
    elif name == "GET /metrics":
        parts.append("Scope: `read`, of a key for all namespaces.")
    if given := operation.get("parameters"):
        parts.append("\n".join(_parameters(given)))
    if body := operation.get("requestBody"):
        need = "" if body.get("required") else " (may be left out)"
        parts.append(f"**Body**{need}")
        parts += _contents(body["content"])
    problems = []
    for status, answer in operation["responses"].items():
        if "application/problem+json" in answer.get("content", {}):
            problems.append(f"[`{status}`](#problems)")
        else:
            parts.append(f"**Answer `{status}`**")
            parts += _contents(answer.get("content", {}))
    if problems:
        parts.append(f"**Problems**: {', '.join(problems)}")
    return "\n\n".join([*parts, ""])


def _problems(problem: Schema) -> Iterator[str]:
    """Yield the members of problems, and the problems of each status."""
    yield "## Problems { #problems }\n"
    members = {key: each for key, each in problem["properties"].items() if key != "code"}
    code = {"type": "string", "description": "Which one: below, by their status."}
    schema = {**problem, "examples": [], "properties": {"code": code, **members}}
    yield "\n\n".join(_contents({"application/problem+json": {"schema": schema}}))
    yield "\n| status | codes |\n|---|---|"
    kinds = problem_types()
    for status in sorted({each.status for each in kinds}):
        codes = [f"[`{k.code}`](errors.md#{k.code})" for k in kinds if k.status == status]
        yield f"| `{status}` | {', '.join(codes)} |"


def _parameters(given: Sequence[Schema]) -> Iterator[str]:
    yield "| parameter | in | kind | meaning |"
    yield "|---|---|---|---|"
    for each in given:
        need = "required" if each.get("required") else "optional"
        yield (
            f"| `{each['name']}` | {each['in']}, {need} | {_kind(each['schema'])}"
            f" | {_cell(each.get('description', ''))} |"
        )


def _contents(content: Mapping[str, Schema]) -> Iterator[str]:
    for media, each in content.items():
        yield f"`{media}`"
        if rows := list(_members(each.get("schema", {}))):
            yield "\n".join(["| member | kind | meaning |", "|---|---|---|", *rows])
        example = each.get("example") or next(iter(each["schema"].get("examples", ())), None)
        if isinstance(example, str):
            yield f"```text\n{example.rstrip()}\n```"
        elif example is not None:
            yield f"```json\n{json.dumps(example, ensure_ascii=False, indent=2)}\n```"


def _members(schema: Schema, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield a row for each member of *schema*, including nested objects and lists."""
    for name, each in schema.get("properties", {}).items():
        plain = _without_null(each)
        need = "" if name in schema.get("required", ()) else "optional; "
        text = _cell(each.get("description") or plain.get("description") or "")
        yield f"| `{prefix}{name}` | {need}{_kind(each)} | {text} |"
        inner = _without_null(plain.get("items", {}))
        if depth < _DEPTH_MAX:
            # A problem in its place has its own schema.
            inner = inner.get("anyOf", [inner])[0]
            yield from _members(plain, f"{prefix}{name}.", depth + 1)
            yield from _members(inner, f"{prefix}{name}[].", depth + 1)


def _without_null(schema: Schema) -> Schema:
    """*schema*, or the one besides null that it may be."""
    others = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return others[0] if len(others) == 1 else schema


def _kind(schema: Schema) -> str:
    """Return the type of a value of *schema*, with its bounds."""
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if "anyOf" in schema:
        kinds = dict.fromkeys(_kind(each) for each in schema["anyOf"])
        return " or ".join(kinds)
    if schema.get("pattern") == _DURATION or schema.get("examples") == ["5s"]:
        return "duration such as `5s`"
    types = schema.get("type", "anything")
    types = [types] if isinstance(types, str) else types
    form = _FORMS.get(schema.get("format", ""))
    names = [form if each == "string" and form else _name(each, schema) for each in types]
    return _cell(", ".join([" or ".join(names), *_bounds(schema)]))


def _bounds(schema: Schema) -> Iterator[str]:
    for least, most, what in _BOUNDS:
        low, high = schema.get(least), schema.get(most)
        if (low, high) == (INT64_MIN, INT64_MAX):
            yield "signed, 64 bits"
        elif low is not None and high is not None:
            yield f"{low:,.0f} to {high:,.0f}{what}"
        elif low is not None:
            yield f"at least {low:,.0f}{what}"
        elif high is not None:
            yield f"at most {high:,.0f}{what}"
    if "pattern" in schema:
        yield f"`{schema['pattern']}`"


def _name(kind: str, schema: Schema) -> str:
    if kind == "array":
        items = schema.get("items", {})
        inner = _name(str(items.get("type", "object")), items)
        return f"list of {inner}s"
    return {"string": "text", "null": "`null`"}.get(kind, kind)


def _cell(text: str) -> str:
    """*text* for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
