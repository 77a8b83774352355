"""The items of batches and of streams of adds: each valid, or its own problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec
import pydantic_core
from msgspec import Raw, Struct
from pydantic import TypeAdapter, ValidationError

from api.http.connections import Steps
from api.http.fast_json import read_batch, read_lines
from api.http.models import AtomicItem, BatchAddBody, BatchAddItem, TokenBody, check_size, read_body
from api.http.problems import ItemProblems, body_error
from api.http.responses import added_texts
from counter.background import TURN_ITEMS
from counter.bounds import Bounds, terms_if_bounded
from counter.core.adds import adds_of
from counter.core.holds import Wanted
from counter.core.rate_limits import Allowance
from counter.core.results import Add, Added, Cancelled, Item
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError
from counter.limits import ADD_STREAM_LINE_BYTES_MAX
from counter.tokens import parse_generation_time, parse_nonce
from counter.types import Event, Namespace, Token

_BATCH_ADD_ITEM: Final[TypeAdapter[BatchAddItem]] = TypeAdapter(BatchAddItem)
_LINE: Final = re.compile(rb"\S[^\n]*")


_Outcome = TypeVar("_Outcome", Added, Cancelled)


class _Body(Struct, forbid_unknown_fields=True):
    items: list[Raw]


_read_items: Final = msgspec.json.Decoder(_Body).decode


class Items(NamedTuple):
    """The items of a batch: as *events* if all have tokens, which is usual; else as *adds*."""

    events: Sequence[Event]
    adds: Sequence[Add | CounterError] = ()

    @classmethod
    def of_json(cls, body: bytes, most: int) -> Steps[Items]:
        """Read a body in JSON. Raises InvalidBodyError, also for more than *most* items."""
        events = read_batch(body)
        if events is not None:
            check_number("items", len(events), most)
            return cls(events)
        yield
        raws = _raw_items(body, most)
        yield
        check_size(BatchAddBody, body)
        return (yield from cls.of_lines([*map(bytes, raws)]))

    @classmethod
    def of_lines(cls, lines: Sequence[bytes | None], first: int = 0) -> Steps[Items]:
        """Read *lines* of JSON; None is one that is too long. *first* is the index of the first."""
        events: list[Event] = []
        adds: list[Add | CounterError] = []
        problems = ItemProblems()
        for start in range(0, len(lines), TURN_ITEMS):
            if start:
                yield
            part = lines[start : start + TURN_ITEMS]
            usual = read_lines(part)
            if usual is not None and not adds:
                events += usual
                continue
            adds = adds or [*adds_of(events)]
            if usual is not None:
                adds += adds_of(usual)
                continue
            adds += [_item(line, index, problems) for index, line in enumerate(part, first + start)]
        return cls((), adds) if adds else cls(events)

    def only(self) -> Add | None:
        """Return the add of a batch that has one item, if it is valid."""
        adds = self.adds or adds_of(self.events)
        return adds[0] if len(adds) == 1 and isinstance(adds[0], Add) else None

    async def add(
        self, service: CounterService, namespace: Namespace, allowance: Allowance
    ) -> Sequence[Added | CounterError]:
        """Add them; return the outcome of each."""
        if self.events:
            return await service.add_events(namespace, self.events, allowance)
        adds = [each for each in self.adds if isinstance(each, Add)]
        outcomes = await service.add_many(namespace, adds, allowance)
        return outcomes if len(adds) == len(self.adds) else self._with_problems(outcomes)

    async def cancel(
        self, service: CounterService, namespace: Namespace, allowance: Allowance
    ) -> Sequence[Cancelled | CounterError]:
        """Cancel them; return the outcome of each."""
        adds = [each for each in self.adds if isinstance(each, Add)] or adds_of(self.events)
        outcomes = await service.cancel_many(namespace, adds, allowance)
        return outcomes if self.events else self._with_problems(outcomes)

    def _with_problems(
        self, outcomes: Sequence[_Outcome | CounterError]
    ) -> Sequence[_Outcome | CounterError]:
        """Return *outcomes* of the valid items, and the problems of the others, in order."""
        left = iter(outcomes)
        return [next(left) if isinstance(each, Add) else each for each in self.adds]


def texts_of(namespace: Namespace, outcomes: Sequence[Added | CounterError]) -> Steps[list[str]]:
    """Return the outcomes in JSON."""
    texts: list[str] = []
    for start in range(0, len(outcomes), TURN_ITEMS):
        if start:
            yield
        texts += added_texts(namespace, outcomes[start : start + TURN_ITEMS])
    return texts


def check_number(field: str, count: int, most: int) -> None:
    """Raise InvalidBodyError unless a batch may have so many."""
    if not 1 <= count <= most:
        raise InvalidBodyError(f"{field} has {count} items; 1 to {most} are allowed", field=field)


def lines_of(body: bytes, most: int) -> list[bytes]:
    """Return the lines of *body* that are not empty. Raises InvalidBodyError for more than
    *most*, without looking at the others."""
    found = islice(_LINE.finditer(body), most + 1)
    lines = [each[0].rstrip() for each in found]
    if len(lines) > most:
        raise InvalidBodyError(
            f"items has at least {most + 1} items; 1 to {most} are allowed", field="items"
        )
    check_number("items", len(lines), most)
    return lines


def token_of(body: TokenBody | None) -> Token | None:
    """The token of a body. Raises InvalidBodyError, naming the field, the value and the bound."""
    if body is None:
        return None
    text = body["token"]
    try:
        nonce = parse_nonce(text)
    except ValueError as error:
        raise InvalidBodyError(
            f"idempotency_token.token is {text!r}, not a nonce of 128 bits: write it as a"
            " UUID or as 32 hexadecimal digits",
            field="idempotency_token.token",
        ) from error
    text = body["generation_time"]
    try:
        time_us = parse_generation_time(text)
    except ValueError as error:
        raise InvalidBodyError(
            f"idempotency_token.generation_time is {text!r}: {error}; write it like"
            " 2026-01-31T08:15:30.000250Z",
            field="idempotency_token.generation_time",
        ) from error
    return Token(nonce, time_us)


def terms_from(delta: int, at_least: int | None, at_most: int | None, at: str = "") -> bytes | None:
    """The terms of an add; None if it has no bounds. *at* is the path to it. Raises
    InvalidBodyError."""
    try:
        return terms_if_bounded(delta, at_least, at_most)
    except ValueError as error:
        raise InvalidBodyError(f"{at}{error}", field=f"{at}at_least") from error


def wanted_from(amount: int, lasts_us: int, at_least: int | None, at_most: int | None) -> Wanted:
    """The hold that a body asks for. Raises InvalidBodyError."""
    # Raises if no count is within the bounds.
    terms_from(amount, at_least, at_most)
    return Wanted(amount, lasts_us, Bounds(at_least, at_most))


def items_of(items: Sequence[AtomicItem]) -> list[Item]:
    """The items of an atomic add. Raises InvalidBodyError."""
    return [
        Item(
            each.counter,
            each.delta,
            terms_from(each.delta, each.at_least, each.at_most, f"items.{index}."),
        )
        for index, each in enumerate(items)
    ]


def _raw_items(body: bytes, most: int) -> Sequence[Raw]:
    """Return the items of a JSON body, each in JSON. Raises InvalidBodyError if it has none, or
    more than *most*."""
    try:
        # Text that is not UTF-8 is not JSON, wherever it is: items are taken as they are here.
        body.decode()
        raws = _read_items(body).items
    except (ValueError, RecursionError):
        # The models say what is wrong with it.
        items = read_body(BatchAddBody, body).items
        raws = [Raw(pydantic_core.to_json(each)) for each in items]
    check_number("items", len(raws), most)
    return raws


def _item(raw: bytes | None, index: int, problems: ItemProblems) -> Add | CounterError:
    """Read the item at *index*, or return its problem."""
    try:
        return _add_of_json(raw, index)
    except InvalidBodyError as error:
        return problems.of(error, _untraced)
    except ValidationError as error:
        return problems.of(error, lambda wrong: body_error(wrong, ("items", index)))


def _untraced(error: InvalidBodyError) -> InvalidBodyError:
    """Return *error* without its traceback and its cause, whose frames refer to the list that it is
    put in: only the garbage collector would free such a cycle."""
    return InvalidBodyError(error.detail, **error.fields)


def _add_of_json(raw: bytes | None, index: int) -> Add:
    if raw is None:
        raise InvalidBodyError(
            f"items.{index} has more than {ADD_STREAM_LINE_BYTES_MAX} bytes; no line may",
            field=f"items.{index}",
        )
    check_size(BatchAddItem, raw, f"items.{index}.")
    item = _BATCH_ADD_ITEM.validate_json(raw)
    try:
        token = token_of(item.get("idempotency_token"))
        terms = terms_from(item["delta"], item.get("at_least"), item.get("at_most"))
    except InvalidBodyError as error:
        error.detail = f"items.{index}.{error.detail}"
        raise
    return Add(item["counter"], item["delta"], token, terms)
