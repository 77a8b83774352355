"""Generate the reference of errors: a section for each code, from the source of /problems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from api.document.problem_page import example_text, explained, shapes
from api.http.problems import problem_types
from counter.errors import CounterError

#: Pages with more about some of them.
_MORE: Final[Mapping[str, str]] = {
    "hold_expired": "[The states of a hold](../tokens.md#the-states-of-a-hold)",
    "hold_released": "[The states of a hold](../tokens.md#the-states-of-a-hold)",
    "hold_settled": "[The states of a hold](../tokens.md#the-states-of-a-hold)",
    "hold_unknown": "[The states of a hold](../tokens.md#the-states-of-a-hold)",
    "invalid_parameter": "[Conventions](../http.md#conventions)",
    "key_invalid": "[API keys](../security.md#api-keys)",
    "key_missing": "[API keys](../security.md#api-keys)",
    "namespace_immutable": "[Namespaces](../http.md#namespaces)",
    "origin_refused": "[Without keys](../security.md#without-keys)",
    "overloaded": "[Overload](../operations.md#overload)",
    "quota_exceeded": "[Settings](../configuration.md#requests)",
    "rate_limited": "[Limits](../http.md#limits)",
    "scope_insufficient": "[Every route](routes.md), with its scope",
    "token_conflict": "[Idempotency](../http.md#idempotency)",
    "token_missing": "[Idempotency](../http.md#idempotency)",
    "token_pending": "[Idempotency](../http.md#idempotency)",
    "token_too_old": "[Unknown outcomes](../python.md#unknown-outcomes)",
}

_HEAD: Final = """# Errors

Every answer that is not 2xx is a problem document ([RFC
9457](https://www.rfc-editor.org/rfc/rfc9457), `application/problem+json`), and so is a failed item
of a batch. Its `type` is `/problems#<code>`: a page of the service that has the same sections as
this one. The SDK raises the named class of `counter_client.errors`; all are `CounterError`.

- `applied` describes the *token*: it is `false` only if it was decided permanently that the add is
  not counted, and `null` if this answer does not know.
- `retry` says what to do: `same_token` (send the same request again, after `retry_after` seconds if
  given), `new_token` (this token never counts; a new one is safe) or `never`.

| code | status | applied | retry |
|---|---|---|---|
"""


def errors_page() -> str:
    """The page, in Markdown."""
    kinds = problem_types()
    rows = [
        f"| [`{kind.code}`](#{kind.code}) | {kind.status} | {_applied(each)} | `{each.retry}` |"
        for kind in kinds
        for each in shapes(kind)
    ]
    return _HEAD + "\n".join([*rows, "", *map(_section, kinds)])


def _applied(error: CounterError) -> str:
    return f"`{json.dumps(error.applied)}`"


def _section(kind: type[CounterError]) -> str:
    problem = explained()[kind.code]
    both = shapes(kind)
    meanings = " or ".join(f"applied {_applied(each)}, retry `{each.retry}`" for each in both)
    examples = "\n\n".join(f"```json\n{example_text(each)}\n```" for each in both)
    more = f"\n\nMore: {_MORE[kind.code]}." if kind.code in _MORE else ""
    return f"""
## `{kind.code}` {{ #{kind.code} }}

**{kind.status}** · {meanings} · `{kind.__name__}`

{kind.title}.

**When:** {problem.when}.

**What to do:** {problem.do}.

{problem.more}{more}

{examples}
"""
