"""Run commands of clients/conformance/README.md with the Python SDK."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any, Final

from counter_client import (
    CounterClient,
    CounterError,
    Key,
    Options,
    Token,
    UnexpectedAnswerError,
    UnknownOutcomeError,
    UnreachableError,
)

_AT_ONCE_MAX: Final = 32
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
        return _failed(error, is_read=command["do"] == "get")


def _run(client: CounterClient, command: Mapping[str, Json]) -> dict[str, Json]:
    token = _credential(command)
    counter = command.get("counter", "")
    match command["do"]:
        case "add":
            added = client.add(counter, int(command["delta"]), token=token)
            return {"replayed": added.replayed}
        case "add_and_get":
            found = client.add_and_get(counter, int(command["delta"]), token=token)
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
            return {"count": str(count.count), "accuracy": count.accuracy}
        case "resolve":
            return {"applied": client.resolve(command["unfinished"]).applied}
        case "new":
            return _shown(Token.new())
        case "parse":
            return _shown(Token.parse(command["text"]))
        case "derive" if token is not None:
            return _shown(token.derive(command["label"]))
    raise ValueError(f"no command is called {command['do']!r}")


def _credential(command: Mapping[str, Json]) -> Token | Key | None:
    if "key" in command:
        return Token.from_key(command["key"])
    if "token" not in command:
        return None
    return Token.parse(f"{command['token']['token']}@{command['token']['generation_time']}")


def _items(command: Mapping[str, Json]) -> list[tuple[str, int]]:
    return [(each["counter"], int(each["delta"])) for each in command["items"]]


def _batch(client: CounterClient, items: list[tuple[str, int]]) -> list[dict[str, Json]]:
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
    return {"outcome": "refused", "code": code, "applied": error.applied}


if __name__ == "__main__":
    main()
