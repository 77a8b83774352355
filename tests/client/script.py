"""Scripted answers for the retry logic, and a clock that only pauses move."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from counter_client.calls import Response
from counter_client.failures import UnreachableError
from counter_client.options import Options
from counter_client.retrying import Answer, Budget, Effect, Pause, Policy, Send, Steps, drive

T = TypeVar("T")


class Script:
    """Answers each attempt with the next of *answers*; records sends and pauses."""

    def __init__(self, answers: Iterable[Answer | Callable[[Send], Answer]]) -> None:
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        #: When each of ``sent`` was.
        self.moments: list[float] = []
        self.now_s = 1_000.0
        self._answers = iter(answers)

    def policy(self, **options: Any) -> Policy:
        """Always the longest pause that may be drawn."""
        chosen = Options(**options)
        budget = Budget.of(chosen, self.now_s)
        return Policy(
            *(chosen, budget, lambda: self.now_s),
            draw=lambda most: most,
            wall_us=lambda: int(self.now_s * 1e6),
        )

    def run(self, steps: Steps[T]) -> T:
        return drive(steps, self._do)

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            self.sent.append(effect)
            self.moments.append(self.now_s)
            answer = next(self._answers)
            return answer(effect) if callable(answer) else answer
        if isinstance(effect, Pause):
            self.pauses.append(effect.seconds)
            self.now_s += effect.seconds
            return None
        return effect.work()

    def bodies(self) -> list[Any]:
        """The sent bodies, parsed."""
        return [json.loads(each.request.body or b"null") for each in self.sent]


def lost() -> UnreachableError:
    return UnreachableError("no response")


def problem(code: str, status: int, retry: str, **more: Any) -> Response:
    """A problem document as the service writes it."""
    body = {"code": code, "status": status, "retry": retry, "applied": None, "detail": code, **more}
    return Response(status, json.dumps(body).encode())


def added(send: Send) -> Response:
    """The response to an add, or to a batch with every item added."""
    body = json.loads(send.request.body or b"")
    if "items" in body:
        return batch(*["added"] * len(body["items"]))(send)
    counter = unquote(send.request.path.split("/")[-2])
    found = added_body(counter, body["delta"], body["idempotency_token"])
    return Response(200, json.dumps(found).encode())


def batch(*results: Any) -> Callable[[Send], Response]:
    """The response to a batch: each result is a problem, or ``added``."""

    def answer(send: Send) -> Response:
        items = json.loads(send.request.body or b"")["items"]
        pairs = zip(results, items, strict=True)
        found = [
            added_body(x["counter"], x["delta"], x["idempotency_token"])
            if each == "added"
            else each
            for each, x in pairs
        ]
        return Response(200, json.dumps({"results": found}).encode())

    return answer


def added_body(counter: str, delta: int, token: Mapping[str, str]) -> dict[str, Any]:
    return {
        "namespace": "default",
        "counter": counter,
        "delta": delta,
        "event_time": token["generation_time"],
        "replayed": False,
    }


def small_budget(**bounds: float) -> Budget:
    """A bucket that begins full at the time 0."""
    at_once, per_s, per_call = bounds["at_once"], bounds["per_s"], bounds["per_call"]
    return Budget(at_once, per_s, per_call, at_once, 0.0)
