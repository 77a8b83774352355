"""What a program gives a client, looked at before anything is sent.

All here raise InvalidParameterError, which names the value and what it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final, TypeVar

from counter import limits, types
from counter.client.tokens import Credential, Key
from counter.errors import InvalidParameterError
from counter.names import check_counter_name, is_namespace_name

T = TypeVar("T")
#: Counters and what is added to each: pairs, or a mapping.
Items = Iterable[tuple[str, int]] | Mapping[str, int]
_SHOWN_CHARS_MAX: Final = 80


def check_delta(delta: int) -> int:
    """*delta*, if it is a signed 64-bit integer."""
    if type(delta) is not int or not limits.INT64_MIN <= delta <= limits.INT64_MAX:
        raise InvalidParameterError(
            f"the delta is {_shown(delta)}; it must be an integer from {limits.INT64_MIN} to"
            f" {limits.INT64_MAX}"
        )
    return delta


def checked_name(counter: str) -> str:
    """*counter*, if it can be a counter's name."""
    if not isinstance(counter, str):
        raise InvalidParameterError(f"a counter's name is text, and this is {_shown(counter)}")
    try:
        return check_counter_name(counter)
    except ValueError as error:
        raise InvalidParameterError(f"{_shown(counter)}: {error}") from error


def checked_names(counters: Iterable[str]) -> list[str]:
    """*counters* as a list."""
    if isinstance(counters, str):
        raise InvalidParameterError(
            f"the counters are the text {_shown(counters)}; give a list of names"
        )
    return [checked_name(each) for each in _each(counters, "counters")]


def checked_items(items: Items, most: int) -> list[tuple[str, int]]:
    """*items* as a list of 1 to *most*."""
    found: Iterable[tuple[str, int]] = items.items() if isinstance(items, Mapping) else items
    checked = []
    for each in _each(found, "items"):
        try:
            counter, delta = each
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(
                f"an item is {_shown(each)}; it must be a counter's name and a delta"
            ) from error
        checked.append((checked_name(counter), check_delta(delta)))
    if not 1 <= len(checked) <= most:
        raise InvalidParameterError(f"there are {len(checked)} items; 1 to {most} are allowed")
    return checked


def checked_token(token: Credential) -> Credential:
    """*token*, if it is one, or a key."""
    if not isinstance(token, types.Token | Key):
        raise InvalidParameterError(
            f"the token is {_shown(token)}; make one of it: Token.from_key(...) of an id of your"
            " own, Token.parse(...) of what str() made of a token"
        )
    return token


def checked_namespace(namespace: str) -> str:
    """*namespace*, if it can be a namespace's name."""
    if not isinstance(namespace, str) or not is_namespace_name(namespace):
        raise InvalidParameterError(
            f"the namespace is {_shown(namespace)}; its name begins with a small letter, and has up"
            " to 63 small letters, digits, - and _"
        )
    return namespace


def moment_text(moment: datetime | None) -> str | None:
    """*moment* as a query has it."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise InvalidParameterError(f"{_shown(moment)} is no datetime; give one in UTC")
    if moment.tzinfo is None:
        raise InvalidParameterError(f"{moment} has no time zone; give one, such as UTC")
    return moment.isoformat()


def _each(values: Iterable[T], what: str) -> Iterator[T]:
    try:
        return iter(values)
    except TypeError as error:
        raise InvalidParameterError(f"the {what} are {_shown(values)}; give a list") from error


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
