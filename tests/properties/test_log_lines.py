"""Nothing that is logged can end its line, begin another one, or move a terminal's cursor."""

import io
import json
import logging
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from counter.telemetry.logs import LineFormatter

#: Surrogates too: a body in JSON can hold lone ones.
TEXTS = st.text(st.characters(codec=None, exclude_categories=[]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)


def written(as_json: bool, message: str, logged: dict[str, Any], fault: str | None) -> list[str]:
    """The lines that a handler writes of one record."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(as_json=as_json))
    logger = logging.Logger("counter.test")
    logger.addHandler(handler)
    try:
        if fault is not None:
            raise ValueError(fault)
    except ValueError:
        logger.exception("%s", message, extra={"fields": logged})
    else:
        logger.warning("%s", message, extra={"fields": logged})
    text = stream.getvalue()
    assert text.endswith("\n")
    return text[:-1].split("\n")


@example("\x7f\x9b2J\u2028\u202e\ud800", {"x": {"\n": "\x7f"}}, "\x7f\nforged")
@given(TEXTS, st.dictionaries(NAMES, VALUES, max_size=4), st.none() | TEXTS)
def test_json_is_one_line_of_ascii_with_all_fields(
    message: str, logged: dict[str, Any], fault: str | None
) -> None:
    [line] = written(True, message, logged, fault)
    assert line.isascii()
    assert line.isprintable()
    read = json.loads(line)
    assert read["message"] == message
    assert read["logger"] == "counter.test"
    assert read["level"] == ("warning" if fault is None else "error")
    for name, value in logged.items():
        if name not in ("time", "level", "logger", "message", "exception") and is_json(value):
            assert read[name] == value
    assert fault is None or fault in read["exception"]


@example("\x7f\x9b2J\u2028\u202e\ud800", {"x": {"\n": "\x7f"}}, "\x7f\nforged")
@given(TEXTS, st.dictionaries(NAMES, VALUES, max_size=4), st.none() | TEXTS)
def test_text_is_one_line_and_the_rest_is_indented(
    message: str, logged: dict[str, Any], fault: str | None
) -> None:
    first, *further = written(False, message, logged, fault)
    level = "WARNING" if fault is None else "ERROR"
    assert f" {level} counter.test: " in first
    assert first.isprintable()
    assert all(each.startswith("    ") and each.isprintable() for each in further)
    assert bool(further) == (fault is not None)


def is_json(value: Any) -> bool:
    """Whether *value* comes back from JSON as it is."""
    if isinstance(value, dict):
        return all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    return not isinstance(value, bytes)
