"""Convert docstrings to Markdown: roles such as ``:class:`Token```, literals in double backticks,
and arguments in asterisks."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_ROLE: Final = re.compile(r":(?:class|meth|func|mod|data|attr):`~?(?:[\w.]*\.)?(\w+)`")
_LITERAL: Final = re.compile(r"``([^`]+)``")
#: An argument: a lone word in asterisks.
_ARGUMENT: Final = re.compile(r"(?<![\w*`])\*(\w+)\*(?![\w*`])")
#: A comment that documents the attribute below it.
_COMMENT: Final = re.compile(r"^\s*#: ?(.*)$")


class Docstrings(griffe.Extension):
    """Convert each docstring, and the ``#:`` comments above attributes to docstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (comment := _comment_above(attr)):
            attr.docstring = griffe.Docstring(markdown_of(comment), parent=attr)


def markdown_of(text: str) -> str:
    """*text* of a docstring as Markdown."""
    text = _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", text))
    return _ARGUMENT.sub(r"`\1`", text)


def _comment_above(attr: griffe.Attribute) -> str:
    path = attr.filepath
    if attr.lineno is None or attr.parent is None or not attr.parent.is_class:
        return ""
    if isinstance(path, list):
        return ""
    found: list[str] = []
    lines = attr.lines_collection[path]
    for line in reversed(lines[: attr.lineno - 1]):
        said = _COMMENT.match(line)
        if said is None:
            break
        found.append(said[1])
    return " ".join(reversed(found))
