"""The floor: raw ASGI that parses the body, answers, and does nothing else."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from pydantic import TypeAdapter
from typing_extensions import TypedDict


class _Token(TypedDict):
    token: str
    generation_time: str


class _Add(TypedDict):
    delta: int
    idempotency_token: _Token


#: Four times as fast as json.loads, and it checks the types too.
_ADD: Final = TypeAdapter(_Add).validator


class Floor:
    """An ASGI application without framework and storage. It counts in memory, so that it can be
    checked that work was done; a request's token is parsed and given no thought."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an add, or a look at counts."""
        body = await _body(receive)
        # /v1/namespaces/{namespace}/counters/{counter}/add, or .../batch/get
        _, _, _, namespace, *rest = scope["path"].split("/")
        if rest[-1] == "add":
            answer = self._add(namespace, rest[1], _ADD.validate_json(body))
        else:
            names = json.loads(body)["counters"]
            found = [{"counter": name, "count": self._counts[name]} for name in names]
            answer = json.dumps({"results": found}).encode()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(answer)),
                ],
            }
        )
        await send({"type": "http.response.body", "body": answer})

    def _add(self, namespace: str, counter: str, add: _Add) -> bytes:
        delta, token = add["delta"], add["idempotency_token"]
        self._counts[counter] += delta
        return (
            f'{{"namespace":"{namespace}","counter":"{counter}","delta":{delta},'
            f'"event_time":"{token["generation_time"]}","replayed":false}}'
        ).encode()


async def _body(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body
