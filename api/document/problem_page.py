"""Render the page at ``/problems``, to which a problem's ``type`` links: a section per code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any, Final, NamedTuple

from api.http.problems import problem_of, problem_types
from counter.errors import CounterError, TokenTooOldError

_STYLE: Final = (
    ":root{color-scheme:light dark;--line:light-dark(#dfe3e8,#313840);"
    "--panel:light-dark(#f6f7f9,#1d2126);--link:light-dark(#1659c7,#8ab4f8)}"
    "body{max-width:46rem;margin:0 auto;padding:1.5rem 1rem 4rem}"
    "body{font:1rem/1.5 system-ui,sans-serif}"
    "h1,h2{line-height:1.25}h2{margin:0 0 .5rem;font-size:1.25rem}a{color:var(--link)}"
    "code,pre{font:.875em/1.5 ui-monospace,monospace;overflow-wrap:anywhere}"
    "pre{background:var(--panel);padding:.75rem;border-radius:6px;white-space:pre-wrap}"
    "section{border-top:1px solid var(--line);padding:1.25rem 0 .5rem}"
    "section:target{border-left:4px solid var(--link);padding-left:1rem}"
    "ul{columns:14rem;padding-left:1.25rem}p{margin:.5rem 0}"
)
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
#: Allows only the page's own style, and no scripts.
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)


class Explained(NamedTuple):
    """The explanation of one code, as ``problems.toml`` has it."""

    #: When it occurs and what to do, as in docs/http.md.
    when: str
    do: str
    #: Further explanation.
    more: str
    #: The ``detail`` of the example, and its further members.
    detail: str
    fields: Mapping[str, Any] = {}
    #: The ``Retry-After`` of the example, in seconds.
    wait_s: int | None = None


@cache
def explained() -> Mapping[str, Explained]:
    """Return the explanation of each code."""
    text = resources.files("api.document").joinpath("problems.toml").read_text(encoding="utf-8")
    return {
        code: Explained(**{key: _one_line(each) for key, each in table.items()})
        for code, table in tomllib.loads(text).items()
    }


def _one_line(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value


def shapes(kind: type[CounterError]) -> Sequence[CounterError]:
    """Return example errors of *kind*: one, or two if ``applied`` varies."""
    about = explained()[kind.code]
    if issubclass(kind, TokenTooOldError):
        past = "the token is 691200 s old; outcomes of tokens are known for 604732 s"
        return kind(about.detail, applied=False), kind(past, applied=None)
    error = kind(about.detail, **about.fields)
    error.retry_after_us = None if about.wait_s is None else about.wait_s * 1_000_000
    return (error,)


def example_text(error: CounterError) -> str:
    """Return the problem document of *error*, indented."""
    return json.dumps(problem_of(error), ensure_ascii=False, indent=2)


def problems_page() -> bytes:
    """Return the page, with the anchors that problems link to."""
    kinds = problem_types()
    listed = "".join(f'<li><a href="#{each.code}">{each.code}</a></li>' for each in kinds)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Problems</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style><main><h1>Problems</h1>"
        "<p>Every error of this service has a <code>code</code> and says what to do:"
        " <code>applied</code> says whether the token's add is counted"
        " (<code>null</code>: not known from this answer), <code>retry</code> whether to send the"
        ' same token again, a new one, or nothing. The routes are in <a href="docs">the'
        ' reference</a>; <a href="console#/lab">the retry lab</a> shows some of these live.</p>'
        f"<ul>{listed}</ul>{''.join(map(_section, kinds))}</main></html>"
    ).encode()


def _section(kind: type[CounterError]) -> str:
    about = explained()[kind.code]
    members = " or ".join(
        f"applied: {json.dumps(each.applied)}, retry: {each.retry}" for each in shapes(kind)
    )
    return (
        f'<section id="{kind.code}"><h2><code>{kind.code}</code> {kind.status}</h2>'
        f"<p>{escape(kind.title)}.</p><p><strong>When:</strong> {_marked(about.when)}.</p>"
        f"<p><strong>What to do:</strong> {_marked(about.do)}.</p><p>{_marked(about.more)}</p>"
        f"<p><code>{members}</code></p><pre>{escape(example_text(shapes(kind)[0]))}</pre></section>"
    )


def _marked(text: str) -> str:
    """Return *text* as HTML, with text in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
