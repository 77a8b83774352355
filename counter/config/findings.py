"""The results of checks, for ``counter doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    part: str
    state: Literal["ok", "warning", "wrong"]
    detail: str
    #: What to do about it, if it is not ok.
    do: str = ""


def ok(part: str, detail: str) -> Finding:
    """Return an ``ok`` finding for *part*."""
    return Finding(part, "ok", detail)


def warning(part: str, detail: str, do: str) -> Finding:
    """Return a ``warning`` for *part*, and what to *do* about it."""
    return Finding(part, "warning", detail, do)


def wrong(part: str, detail: str, do: str) -> Finding:
    """Return a ``wrong`` finding for *part*, and what to *do* about it."""
    return Finding(part, "wrong", detail, do)
