"""The items of batches and of streams of adds: each valid, or its own problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from api.http.fast_json import read_batch, read_lines
from api.http.models import BatchAddBody, BatchAddItem, TokenBody, check_size
from api.http.problems import body_error
from counter.core.results import Add, Added, Credential
from counter.core.service import CounterService
from counter.errors import CounterError, InvalidBodyError
from counter.limits import ADD_STREAM_LINE_BYTES_MAX
from counter.tokens import parse_generation_time, parse_nonce
from counter.types import Event, Namespace, Token

_BATCH_ADD_ITEM: Final[TypeAdapter[BatchAddItem]] = TypeAdapter(BatchAddItem)


class Items(NamedTuple):
    """The items of a batch: as *events* if all have tokens, which is usual; else as *adds*."""

    events: Sequence[Event]
    adds: Sequence[Add | CounterError] = ()

    @classmethod
    def of_json(cls, body: bytes, most: int) -> Items:
        """Read a body in JSON. Raises InvalidBodyError, also for more than *most* items."""
        events = read_batch(body)
        if events is not None:
            check_number("items", len(events), most)
            return cls(events)
        check_size(BatchAddBody, body)
        try:
            # All at once first: bad items are rare.
            items = BatchAddBody.model_validate_json(body).items
        except ValidationError as error:
            raws = _raw_items(body, error)
            check_number("items", len(raws), most)
            return cls(
                (), [_add_of_json(pydantic_core.to_json(raw), i) for i, raw in enumerate(raws)]
            )
        check_number("items", len(items), most)
        return cls((), [_add_of(item, index) for index, item in enumerate(items)])

    @classmethod
    def of_lines(cls, lines: Sequence[bytes | None], first: int = 0) -> Items:
        """Read *lines* of JSON; None is one that is too long. *first* is the index of the first."""
        events = read_lines(lines)
        if events is not None:
            return cls(events)
        return cls((), [_add_of_json(line, index) for index, line in enumerate(lines, first)])

    async def add(
        self, service: CounterService, namespace: Namespace
    ) -> Sequence[Added | CounterError]:
        """Add them; return the outcome of each."""
        if self.events:
            return await service.add_events(namespace, self.events)
        adds = [each for each in self.adds if isinstance(each, Add)]
        outcomes = await service.add_many(namespace, adds)
        if len(adds) == len(self.adds):
            return outcomes
        left = iter(outcomes)
        return [next(left) if isinstance(each, Add) else each for each in self.adds]


def check_number(field: str, count: int, most: int) -> None:
    """Raise InvalidBodyError unless a batch may have so many."""
    if not 1 <= count <= most:
        raise InvalidBodyError(f"{field} has {count} items; 1 to {most} are allowed", field=field)


def lines_of(body: bytes) -> list[bytes]:
    """Return the lines of *body* that are not empty."""
    return [line for each in body.split(b"\n") if (line := each.strip())]


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
    except (ValueError, OverflowError) as error:
        raise InvalidBodyError(
            f"idempotency_token.generation_time is {text!r}: {error}; write it like"
            " 2026-01-31T08:15:30.000250Z",
            field="idempotency_token.generation_time",
        ) from error
    return Token(nonce, time_us)


def _add_of(item: BatchAddItem, index: int) -> Add | CounterError:
    try:
        token: Credential = token_of(item.get("idempotency_token"))
    except CounterError as error:
        error.detail = f"items.{index}.{error.detail}"
        return error
    return Add(item["counter"], item["delta"], token)


def _raw_items(body: bytes, error: ValidationError) -> list[Any]:
    """The items of a JSON body of which some are bad; *error* if it has none."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    if any(each["loc"][:1] != ("items",) or len(each["loc"]) < 2 for each in wrong):
        raise body_error(error) from error
    items: list[Any] = pydantic_core.from_json(body)["items"]
    return items


def _add_of_json(raw: bytes | None, index: int) -> Add | CounterError:
    if raw is None:
        return InvalidBodyError(
            f"items.{index} has more than {ADD_STREAM_LINE_BYTES_MAX} bytes; no line may",
            field=f"items.{index}",
        )
    try:
        check_size(BatchAddItem, raw, f"items.{index}.")
        item = _BATCH_ADD_ITEM.validate_json(raw)
    except InvalidBodyError as error:
        return error
    except ValidationError as error:
        return body_error(error, ("items", index))
    return _add_of(item, index)
