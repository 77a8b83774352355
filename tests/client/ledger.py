"""A service in a few lines: it counts each token once, and loses requests and answers as drawn."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from counter_client.calls import Response
from counter_client.retrying import Answer, Send
from tests.client.script import Script, added_body, lost, problem

#: Faults: the request is lost, its response is lost, it is refused, or it is cut short.
FAULTS = ("none", "request lost", "answer lost", "refused", "half", "void", "pending")


class Ledger:
    """Counts the items of ``batch/add``. *draw* returns the next fault."""

    def __init__(self, draw: Callable[[], str], items_max: int = 1_000) -> None:
        self.counts: Counter[str] = Counter()
        self.items: dict[str, tuple[str, int]] = {}
        self.counted: set[str] = set()
        self.voided: set[str] = set()
        self._draw = draw
        self._items_max = items_max
        self._made = 0

    def answer(self, send: Send) -> Answer:
        """The response to one attempt."""
        if send.request.operation == "tokens":
            return self._tokens(json.loads(send.request.body or b"")["count"])
        fault = self._draw()
        if fault == "request lost":
            return lost()
        if fault == "refused":
            return problem("overloaded", 503, "same_token")
        items = json.loads(send.request.body or b"")["items"]
        if len(items) > self._items_max:
            return problem("invalid_body", 400, "never", field="items")
        results = [self._count(each, fault, at % 2 == 0) for at, each in enumerate(items)]
        if fault == "answer lost":
            return lost()
        return Response(200, json.dumps({"results": results}).encode())

    def _count(self, item: dict[str, Any], fault: str, is_hit: bool) -> dict[str, Any]:
        token = item["idempotency_token"]["token"]
        what = (item["counter"], item["delta"])
        if self.items.setdefault(token, what) != what:
            raise AssertionError(f"the token {token} was used for {self.items[token]} and {what}")
        if token in self.voided:
            return self._problem("token_too_old", "new_token", applied=False)
        if token not in self.counted and is_hit:
            if fault == "void":
                self.voided.add(token)
                return self._problem("token_too_old", "new_token", applied=False)
            if fault == "pending":
                return self._problem("token_pending", "same_token", retry_after=1)
            if fault == "half":
                return self._problem("write_timeout", "same_token")
        if token not in self.counted:
            self.counted.add(token)
            self.counts[item["counter"]] += item["delta"]
        return added_body(*what, item["idempotency_token"])

    def _problem(self, code: str, retry: str, **more: Any) -> dict[str, Any]:
        return {"code": code, "retry": retry, "applied": None, "detail": code, **more}

    def _tokens(self, count: int) -> Answer:
        if self._draw() == "request lost":
            return lost()
        made = []
        for _ in range(count):
            self._made += 1
            moment = "2026-11-21T13:01:23.875103Z"
            made.append({"token": f"{self._made:032x}", "generation_time": moment})
        return Response(200, json.dumps({"tokens": made}).encode())


def drawing(data: st.DataObject, *, most: int = 12, items_max: int = 1_000) -> Ledger:
    """A service with up to *most* faults, and none after them."""
    faults = iter(data.draw(st.lists(st.sampled_from(FAULTS), max_size=most)))
    return Ledger(lambda: next(faults, "none"), items_max)


def forever(ledger: Ledger) -> Script:
    """Answer each attempt by *ledger*."""
    return Script(iter(lambda: ledger.answer, None))
