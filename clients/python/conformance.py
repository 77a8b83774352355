"""Run commands of clients/conformance/README.md with the Python SDK."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any, Final

from counter_client import (
    BoundReachedError,
    Bounds,
    Count,
    CounterClient,
    CounterError,
    Event,
    HoldCount,
    HoldSettledError,
    HoldState,
    Key,
    Options,
    Rejected,
    RejectedError,
    Token,
    UnexpectedAnswerError,
    UnknownOutcomeError,
    UnreachableError,
    UnsentError,
)

_AT_ONCE_MAX: Final = 32
_WRITES: Final = (
    *("add", "add_and_get", "clear", "delete", "atomic", "batch", "resolve", "cancel"),
    *("hold", "settle", "release"),
)
#: No buffer flushes by itself before this.
_DELAY_S: Final = 60.0
Json = Any


def main() -> None:
    """Answer each line of standard input by a line of standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--timeout", dest="deadline_s", type=_seconds, default=30.0)
    parser.add_argument("--attempt-timeout", dest="attempt_timeout_s", type=_seconds, default=5.0)
    parser.add_argument("--backoff-first", dest="backoff_first_s", type=_seconds, default=0.05)
    parser.add_argument("--backoff-max", dest="backoff_max_s", type=_seconds, default=5.0)
    parser.add_argument("--retries", dest="retries_at_once", type=float, default=20.0)
    given = vars(parser.parse_args())
    url, namespace, key_file = (given.pop(each) for each in ("url", "namespace", "api_key_file"))
    key = None if key_file is None else key_file.read_text()
    writing, slots = Lock(), Semaphore(_AT_ONCE_MAX)
    with CounterClient(url, namespace, api_key=key, options=Options(**given)) as client:

        def answer(line: str) -> None:
            command = json.loads(line)
            text = json.dumps({"id": command["id"], **outcome(client, command)})
            with writing:
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
            slots.release()

        with ThreadPoolExecutor(_AT_ONCE_MAX) as pool:
            running = []
            for line in sys.stdin:
                slots.acquire()
                running.append(pool.submit(answer, line))
        for each in running:
            each.result()


def _seconds(text: str) -> float:
    if text.endswith("ms"):
        return float(text.removesuffix("ms")) / 1e3
    return float(text.removesuffix("s"))


def outcome(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    """Run *command* and return its outcome."""
    try:
        return {"outcome": "done", **_run(client, command)}
    except CounterError as error:
        return _failed(error, is_read=command["do"] not in _WRITES)


def _run(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    token = _credential(command)
    counter = command.get("counter", "")
    match command["do"]:
        case "add":
            bounds = _bounds(command)._asdict()
            added = client.add(counter, int(command["delta"]), token=token, **bounds)
            return {"replayed": added.replayed}
        case "add_and_get":
            bounds = _bounds(command)._asdict()
            found = client.add_and_get(counter, int(command["delta"]), token=token, **bounds)
            return {"replayed": found.replayed, "count": str(found.count)}
        case "clear" | "delete" as verb:
            ended = (client.clear if verb == "clear" else client.delete)(counter, token=token)
            return {"replayed": ended.replayed}
        case "atomic":
            return {"replayed": [x.replayed for x in client.atomic(_items(command), token=token)]}
        case "batch":
            return {"results": _batch(client, _items(command))}
        case "get":
            count = client.get(counter, max_staleness=command.get("max_staleness"))
            held = _digits(held=count.held or None, held_down=count.held_down or None)
            return {"count": str(count.count), "accuracy": count.accuracy, **held}
        case "buffer":
            return {"failed": _buffer(client, command["items"])}
        case "resolve":
            return {"applied": client.resolve(command["unfinished"]).applied}
        case "cancel":
            return {"was_counted": client.cancel_unfinished(command["unfinished"]).was_counted}
    return _hold(client, command)


def _hold(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    hold, token = command.get("hold", ""), _credential(command)
    match command["do"]:
        case "hold":
            amount, lasts, bounds = command["amount"], command["expires_in"], _bounds(command)
            begun = client.hold(
                *(command["counter"], int(amount)),
                expires_in=lasts,
                token=token,
                **bounds._asdict(),
            ).began
            return {"hold": begun.id, "amount": str(begun.amount), **_sums(begun)}
        case "settle":
            ended = client.settle_hold(hold, int(command["amount"]))
            return {**_digits(settled=ended.settled), "over": ended.over, **_sums(ended)}
        case "release":
            return _sums(client.release_hold(hold))
        case "extend":
            return _held(client.extend_hold(hold, command["expires_in"]))
        case "get_hold":
            return _held(client.get_hold(hold))
        case "holds":
            return {"holds": [_held(each) for each in client.holds(command["counter"])]}
    return _read(client, command)


def _sums(found: HoldCount) -> dict[str, Json]:
    return _digits(count=found.count, held=found.held)


def _held(found: HoldState) -> dict[str, Json]:
    times = {"expires_at": found.expires_at, "ended_at": found.ended_at}
    return {
        "hold": found.id,
        "amount": str(found.amount),
        "state": found.state,
        "over": found.over,
        **_digits(settled=found.settled),
        **{name: _text(moment) for name, moment in times.items() if moment is not None},
    }


def _read(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    counter, limit = command.get("counter", ""), command.get("limit")
    staleness = {"max_staleness": command.get("max_staleness")}
    start, end = _moment(command.get("from")), _moment(command.get("to"))
    match command["do"]:
        case "get_many":
            counts = client.get_many(command["counters"], **staleness)
            return {"counts": [_counted(each) for each in counts]}
        case "names":
            return {"counters": list(client.counters(command.get("prefix")))}
        case "list":
            found = client.counts(
                command.get("prefix"),
                largest_first=command.get("order") == "-count",
                limit=limit,
                **staleness,
            )
            return {"counts": [_counted(each) for each in found]}
        case "sum":
            total = client.sum(command.get("prefix"), **staleness)
            return {"sum": str(total.count), "counters": total.counters}
        case "between":
            change = client.between(counter, start, end, tz=command.get("tz"))
            return {"count": str(change.count), "delta": str(change.delta)}
        case "history":
            points = client.history(counter, start, end, command.get("step"), tz=command.get("tz"))
            return {
                "points": [
                    {"time": _text(x.time), "count": str(x.count), "delta": str(x.delta)}
                    for x in points
                ]
            }
        case "events":
            events = client.events(counter, start, end, limit=limit)
            return {"events": [_event(each) for each in events]}
        case "live":
            return {"count": str(_live(client, counter, int(command["until"])))}
        case "busiest":
            busiest = client.busiest(limit or 10, span=command.get("span", "10s"))
            busy = [{"counter": x.counter, "count": str(x.count)} for x in busiest.counters]
            return {"counters": busy}
    return _manage(client, command)


def _manage(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    settings = command.get("settings", {})
    match command["do"]:
        case "recount":
            return {"windows": client.recount(command["counter"])}
        case "tokens":
            return {"tokens": len(client.tokens(command["number"]))}
        case "namespaces":
            return {"namespaces": [each["namespace"] for each in client.namespaces()]}
        case "namespace":
            return {"counter_type": client.namespace()["counter_type"]}
        case "create_namespace":
            return {"counter_type": client.create_namespace(**settings)["counter_type"]}
        case "change_namespace":
            return {"counter_type": client.change_namespace(**settings)["counter_type"]}
        case "delete_namespace":
            client.delete_namespace()
            return {}
    return _shown(_made(command))


def _made(command: Mapping[str, Json]) -> Token | Key:
    """Return the credential that *command* makes, reads or derives."""
    token = _credential(command)
    match command["do"]:
        case "new":
            return Token.new()
        case "parse":
            return Token.parse(command["text"])
        case "derive" if token is not None:
            return token.derive(command["label"])
    raise ValueError(f"no command is called {command['do']!r}")


def _counted(count: Count) -> dict[str, Json]:
    return {"counter": count.counter, "count": str(count.count), "accuracy": count.accuracy}


def _event(event: Event) -> dict[str, Json]:
    bounds = _digits(at_least=event.at_least, at_most=event.at_most)
    refused = {} if event.refused is None else {"refused": _digits(**event.refused)}
    return {
        "event_time": _text(event.event_time),
        "event_id": event.event_id,
        "event_item_key": event.event_item_key,
        "delta": str(event.delta),
        "clear": event.clear,
        **bounds,
        **refused,
    }


def _digits(**numbers: int | None) -> dict[str, str]:
    """Return *numbers* as text, without those that are None."""
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _live(client: CounterClient, counter: str, until: int) -> int:
    """Return the first count that is *until*."""
    updates = client.live(counter)
    return next(x.count for x in updates if isinstance(x, Count) and x.count == until)


def _moment(text: str | None) -> Json:
    return text if text in (None, "today") else datetime.fromisoformat(text)


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"


def _buffer(client: CounterClient, items: list[Mapping[str, str]]) -> list[dict[str, Json]]:
    """Add *items* through a buffer; return what is not counted for sure."""
    failed: list[dict[str, Json]] = []
    rejected: tuple[Rejected, ...] = ()
    try:
        with client.buffer(max_delay=_DELAY_S) as buffer:
            for each in items:
                buffer.add(each["counter"], int(each["delta"]))
    except RejectedError as error:
        rejected = error.items
    except UnsentError as error:
        rejected = error.rejected
        for unfinished in error.unfinished:
            [(counter, delta)] = unfinished.items
            end = {"outcome": "unknown", "unfinished": str(unfinished)}
            failed.append({"counter": counter, "delta": str(delta), **end})
        end, why = {"outcome": "unsent"}, error.__cause__
        if isinstance(why, CounterError) and why.retry == "never":
            whole = _failed(why)
            end = whole if whole["outcome"] == "refused" else end
        for counter, delta in error.unsent.items():
            failed.append({"counter": counter, "delta": str(delta), **end})
    for item in rejected:
        end = _failed(item.error)
        failed.append({"counter": item.counter, "delta": str(item.delta), **end})
    return failed


def _credential(command: Mapping[str, Json]) -> Token | Key | None:
    if "key" in command:
        return Token.from_key(command["key"])
    if "token" not in command:
        return None
    return Token.parse(f"{command['token']['token']}@{command['token']['generation_time']}")


def _bounds(given: Mapping[str, str]) -> Bounds:
    return Bounds(**{name: int(given[name]) for name in Bounds._fields if name in given})


def _items(command: Mapping[str, Json]) -> list[tuple[str, int, Bounds]]:
    return [(each["counter"], int(each["delta"]), _bounds(each)) for each in command["items"]]


def _batch(client: CounterClient, items: list[tuple[str, int, Bounds]]) -> list[dict[str, Json]]:
    try:
        results = client.batch(items)
    except CounterError as error:
        return [_failed(error) for _ in items]
    return [
        _failed(each)
        if isinstance(each, CounterError)
        else {"outcome": "done", "replayed": each.replayed}
        for each in results
    ]


def _shown(credential: Token | Key) -> dict[str, Json]:
    if isinstance(credential, Key):
        return {"key": credential.text}
    nonce, _, moment = str(credential).partition("@")
    return {"token": {"token": nonce, "generation_time": moment}}


def _failed(error: CounterError, *, is_read: bool = False) -> dict[str, Json]:
    sys.stderr.write(f"{type(error).__name__}: {error.detail}\n")
    if isinstance(error, UnknownOutcomeError):
        end = "unknown" if error.sent else "unsent"
        return {"outcome": end, "unfinished": str(error.unfinished)}
    if isinstance(error, UnreachableError | UnexpectedAnswerError) or (
        is_read and error.retry == "same_token"
    ):
        return {"outcome": "unknown"}
    code = error.fields.get("code", error.code)
    return {"outcome": "refused", "code": code, "applied": error.applied, **_reached(error)}


def _reached(error: CounterError) -> dict[str, Json]:
    """Return what a refusal because of a bound says, if it says all of it; and what was settled."""
    if isinstance(error, HoldSettledError):
        return _digits(settled=error.settled)
    if not isinstance(error, BoundReachedError):
        return {}
    bounds = _digits(at_least=error.at_least, at_most=error.at_most)
    if None in (error.counter, error.count, error.room) or not bounds:
        return {}
    numbers = _digits(count=error.count, held=error.held, room=error.room)
    return {"counter": error.counter, **numbers, **bounds}


if __name__ == "__main__":
    main()
