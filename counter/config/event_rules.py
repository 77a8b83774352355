"""Map CloudEvents to adds, by the rules of a namespace.

A rule names a type of events, a template of a counter's name and a delta. The template holds paths
in braces: ``{type}``, ``{source}``, ``{subject}``, an extension attribute such as
``{extensions.tenant}``, or into the data, such as ``{data.order.kind}``; a key that holds dots is
in quotes. A delta is a number, or the path of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from counter import limits
from counter.errors import InvalidBodyError
from counter.quantities import check_counter_name
from counter.types import EventRule

#: The text of an attribute: the specification has no control characters in it.
EVENT_TEXT: Final = re.compile(r"^[^\x00-\x1f\x7f-\x9f]*\Z")
_KEY: Final = re.compile(r'\.("[^"]+"|[^.]+)')
_PATH: Final = re.compile(rf"type|source|subject|extensions\.[a-z0-9]+|data({_KEY.pattern})+")
_IN_BRACES: Final = re.compile(r"\{([^{}]*)\}")
#: A whole number as text; so a decimal is read, too, if its fraction is 0.
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}(\.0{1,19})?")
_SHOWN_CHARS_MAX: Final = 80


class CloudEvent(NamedTuple):
    """The CloudEvent attributes that rules use. Within ``data``, decimals are text."""

    id: str
    source: str
    type: str
    subject: str | None
    #: None if there is none, or if it is not JSON.
    data: Any
    #: The other attributes, if the rules need any.
    extensions: Mapping[str, Any] = MappingProxyType({})


def check_rules(rules: Sequence[EventRule]) -> None:
    """Raise InvalidBodyError, naming the field, the value and the bound, for a bad rule."""
    if len(rules) > limits.EVENT_RULES_MAX:
        raise InvalidBodyError(
            f"event_rules has {len(rules)} rules; at most {limits.EVENT_RULES_MAX} are allowed",
            field="event_rules",
        )
    for index, rule in enumerate(rules):
        first = rules.index(rule)
        if first < index:
            name = f"event_rules.{index}"
            raise InvalidBodyError(
                f"{name} is equal to event_rules.{first}, and would count each event twice:"
                " remove one of them",
                field=name,
            )
        for field, fault in (
            ("type", _too_long(rule.type) or _fault_of_type(rule.type)),
            ("counter", _too_long(rule.counter) or _fault_of_template(rule.counter)),
            ("delta", _fault_of_delta(rule.delta)),
        ):
            if fault is not None:
                name = f"event_rules.{index}.{field}"
                raise InvalidBodyError(
                    f"{name} is {_shown(getattr(rule, field))}; {fault}", field=name
                )


def need_extensions(rules: Iterable[EventRule]) -> bool:
    """Return whether any of *rules* reads an extension attribute."""
    return any("{extensions." in r.counter or str(r.delta)[:11] == "extensions." for r in rules)


def rules_of(rules: Sequence[EventRule], kind: str) -> list[EventRule]:
    """Return the *rules* of events of the type *kind*, in their order."""
    return [
        rule
        for rule in rules
        if rule.type == kind or (rule.type.endswith("*") and kind.startswith(rule.type[:-1]))
    ]


def adds_of(rules: Sequence[EventRule], event: CloudEvent) -> list[tuple[str, int]]:
    """Return the counters and deltas of *event*: one for each of *rules*, which are of its type.

    Raises InvalidBodyError if a rule cannot read the event.
    """
    return [(_counter_of(rule, event), _delta_of(rule, event)) for rule in rules]


def _too_long(text: str) -> str | None:
    if 1 <= len(text) <= limits.EVENT_ATTRIBUTE_CHARS_MAX:
        return None
    return f"1 to {limits.EVENT_ATTRIBUTE_CHARS_MAX} characters are allowed"


def _fault_of_type(kind: str) -> str | None:
    if "*" in kind[:-1]:
        return "it matches no event: a * is allowed at the end only"
    if EVENT_TEXT.search(kind) is None:
        return "it matches no event: the type of an event has no control characters"
    return None


def _fault_of_template(template: str) -> str | None:
    wrong = [path for path in _IN_BRACES.findall(template) if not _PATH.fullmatch(path)]
    literal = _IN_BRACES.sub("", template)
    if wrong or re.search("[{}]", literal):
        return (
            "in braces it may hold type, source, subject, extensions.NAME, and paths such as"
            ' data.order.kind or data."key.with.dots"'
        )
    try:
        # Every name would hold this text.
        check_counter_name(literal or template)
    except ValueError as error:
        return str(error)
    return None


def _fault_of_delta(delta: int | str) -> str | None:
    if isinstance(delta, int):
        is_right = limits.INT64_MIN <= delta <= limits.INT64_MAX
    else:
        is_right = (
            _too_long(delta) is None
            and delta.startswith(("data.", "extensions."))
            and _PATH.fullmatch(delta) is not None
        )
    return None if is_right else "it must be a signed 64-bit integer, or a path such as data.amount"


def _counter_of(rule: EventRule, event: CloudEvent) -> str:
    name = _IN_BRACES.sub(lambda found: _text_of(rule, event, found[1]), rule.counter)
    try:
        return check_counter_name(name)
    except ValueError as error:
        raise InvalidBodyError(
            f"the rule {_shown(rule.counter)} gives the counter {_shown(name)}: {error}",
            field="counter",
        ) from error


def _text_of(rule: EventRule, event: CloudEvent, path: str) -> str:
    value = _value_of(rule, event, path)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | str):
        # Cut where the name is too long in any case: a template may repeat a long text.
        return str(value)[: limits.COUNTER_NAME_CHARS_MAX + 1]
    raise _unfit(path, value, f"the rule {_shown(rule.counter)} takes text, a number or a boolean")


def _delta_of(rule: EventRule, event: CloudEvent) -> int:
    if isinstance(rule.delta, int):
        return rule.delta
    value = _value_of(rule, event, rule.delta)
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value.partition(".")[0])
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not limits.INT64_MIN <= value <= limits.INT64_MAX
    ):
        raise _unfit(
            rule.delta,
            value,
            "a delta is a whole number of 64 bits, as a number or as text: count in the smallest"
            " unit",
        )
    return value


def _value_of(rule: EventRule, event: CloudEvent, path: str) -> Any:
    value = getattr(event, path.partition(".")[0])
    for key in _keys_of(path):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        raise InvalidBodyError(
            f"{path} is missing, and the rule of the counter {_shown(rule.counter)} needs it",
            field=path,
        )
    return value


@lru_cache(maxsize=1_024)
def _keys_of(path: str) -> list[str]:
    return [key[1:-1] if key[0] == key[-1] == '"' else key for key in _KEY.findall(path)]


def _unfit(path: str, value: Any, wanted: str) -> InvalidBodyError:
    return InvalidBodyError(f"{path} is {_shown(value)}; {wanted}", field=path)


def _shown(value: Any) -> str:
    """Return *value* as short text. A large number has too many digits to write."""
    is_large = isinstance(value, int) and abs(value) >> _SHOWN_CHARS_MAX
    text = "a very large number" if is_large else repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"
