"""Clients: they follow the plan, retry, hedge, and record the responses."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from counter.clock import parse_rfc3339, to_rfc3339
from counter.limits import MILLISECOND, SECOND
from tests.simulation.history import Changed, History, Item, Seen, Sent
from tests.simulation.plan import CLEARS, Attempt, Change, Read

#: Errors that a client may get for a well-formed add.
_EXPECTED: Final = {
    "no_answer",
    "refused",
    "token_cancelled",
    "token_conflict",
    "token_too_old",
    "token_pending",
    "token_in_future",
    "write_timeout",
    "store_unavailable",
    "overloaded",
    "rate_limited",
    "clock_skew",
    "unavailable",
    "cache_unavailable",
    "slice_missing",
}


class Place(Protocol):
    """Where clients send requests, and the true time."""

    @property
    def apis(self) -> int:
        """How many API processes there are."""
        ...

    @property
    def true_us(self) -> int:
        """Now, in microseconds since 1970."""
        ...

    async def request(
        self,
        api: int,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Status and body of the response; status 0 and a code if none came."""
        ...


class Clients:
    """All of them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.history = History()
        #: Requests that were sent, retries too.
        self.operations = 0
        #: The instant at which the plan's time begins.
        self.begun_us = 0
        #: Namespaces that may not be there yet.
        self.awaited: set[str] = set()

    async def change(self, plan: Change) -> None:
        """Send a change as often as its plan says."""
        token_us = self.begun_us + plan.at_us - plan.age_us
        changed = Changed(plan, token_us)
        known_us = None if plan.key is not None else token_us
        changed.items = [Item(changed, name, delta, known_us) for name, delta in plan.items]
        self.history.changes.append(changed)
        await asyncio.gather(*(self._attempt(changed, each) for each in plan.attempts))

    async def _attempt(self, changed: Changed, attempt: Attempt) -> None:
        await asyncio.sleep(attempt.after_us / SECOND)
        if attempt.retry and (changed.is_cancelled if attempt.cancels else changed.is_definite):
            return
        await self.send(changed, attempt.api, exact=attempt.exact, cancels=attempt.cancels)
        plan = changed.plan
        if plan.reads and changed.is_definite:
            names = tuple(dict.fromkeys(item.counter for item in changed.items))
            other = (attempt.api + plan.number) % self._place.apis
            await self.read(Read(plan.at_us, plan.namespace, names, 0, other))

    async def send(
        self, changed: Changed, api: int, *, exact: bool = False, cancels: bool = False
    ) -> Sent:
        """One request and its response."""
        plan = changed.plan
        items = changed.items
        if plan.how == "atomic" and len(changed.requests) % 2:
            # The place of an item in the list does not matter, but among those of its counter.
            items = sorted(items, key=lambda item: item.counter, reverse=True)
        method, path, body, headers = _request_of(changed, items)
        if cancels:
            method, path, body = _cancel_of(plan, path, body)
            for item in items:
                item.cancel_us = item.cancel_us or self._now_us()
        if exact:
            headers["x-exact"] = str(changed.token_us)
        sent = Sent(self._now_us(), api)
        changed.requests.append(sent)
        self.operations += 1
        sent.status, sent.body = await self._place.request(api, method, path, body, headers)
        sent.answered_us = self._now_us()
        if sent.status == 200 and (plan.how == "batch" or (plan.how == "atomic" and not cancels)):
            for item, answer in zip(items, sent.body["results"], strict=True):
                self._note(item, sent, answer)
        else:
            for item in changed.items:
                self._note(item, sent, sent.body)
        if sent.status == 200 and plan.how == "add-and-get" and not cancels:
            read = Read(plan.at_us, plan.namespace, (changed.items[0].counter,), 0, api)
            self._saw(read, sent.sent_us, sent.body | {"accuracy": "accurate"}, changed.items[0])
        return sent

    def _note(self, item: Item, sent: Sent, answer: Mapping[str, Any]) -> None:
        """Record the outcome of an item."""
        now_us = self._now_us()
        code = answer.get("code")
        if "cancelled" in answer or code == "token_cancelled":
            item.cancelled_us = now_us if item.cancelled_us is None else item.cancelled_us
            item.was_counted |= {answer["was_counted"]} if code is None else set()
        elif _is_after(item.cancelled_us, sent) and (
            code is None or answer.get("applied") is False
        ):
            self._surprise(item, f"was cancelled, and got {dict(answer)}")
        elif code is None:
            item.applied_us = now_us if item.applied_us is None else item.applied_us
            time_us = parse_rfc3339(answer["event_time"])
            if item.event_time_us not in (None, time_us):
                self._surprise(item, f"event_time moved to {answer['event_time']}")
            item.event_time_us = time_us
            item.reported_new += answer["replayed"] is False
        elif code == "token_conflict":
            item.conflict_us = now_us if item.conflict_us is None else item.conflict_us
        elif answer.get("applied") is False:
            item.void_us = now_us if item.void_us is None else item.void_us
            item.refused |= code == "bound_reached"
        elif not self._is_expected(code, item.change.plan.namespace):
            self._surprise(item, f"got {sent.status} {dict(answer)}")

    def _is_expected(self, code: Any, namespace: str) -> bool:
        return code in _EXPECTED or (code == "namespace_unknown" and namespace in self.awaited)

    def _surprise(self, item: Item, text: str) -> None:
        self.history.surprises.append(f"change {item.change.plan.number}: {text}")

    async def names(self, namespace: str, api: int) -> list[str] | None:
        """The counters that are listed; None if no response came."""
        path = f"/v1/namespaces/{namespace}/counters?limit=1000"
        self.operations += 1
        status, body = await self._place.request(api, "GET", path)
        return body["counters"] if status == 200 else None

    async def read(self, plan: Read) -> bool:
        """Read; whether counts came."""
        base = f"/v1/namespaces/{plan.namespace}"
        text = None if plan.staleness_us is None else f"{plan.staleness_us // MILLISECOND}ms"
        if plan.staleness_us == 0:
            text = "0s"
        sent_us = self._now_us()
        self.operations += 1
        if len(plan.counters) == 1:
            query = "" if text is None else f"?max_staleness={text}"
            path = f"{base}/counters/{plan.counters[0]}{query}"
            status, body = await self._place.request(plan.api, "GET", path)
            results = [body]
        else:
            wanted = {"counters": list(plan.counters)}
            wanted |= {} if text is None else {"max_staleness": text}  # type: ignore[dict-item]
            path = f"{base}/batch/get"
            status, body = await self._place.request(plan.api, "POST", path, wanted)
            results = body.get("results", [])
        if status != 200:
            if not self._is_expected(body.get("code"), plan.namespace):
                self.history.surprises.append(f"a read got {status} {body}")
            return False
        for result in results:
            self._saw(plan, sent_us, result)
        return True

    def _saw(
        self, plan: Read, sent_us: int, result: Mapping[str, Any], own: Item | None = None
    ) -> None:
        if "count" not in result:
            return
        self.history.reads.append(
            Seen(
                plan,
                plan.namespace,
                result["counter"],
                sent_us,
                self._now_us(),
                result["count"],
                parse_rfc3339(result["as_of"]),
                result["accuracy"],
                own,
            )
        )

    def _now_us(self) -> int:
        return self._place.true_us


def _is_after(instant_us: int | None, sent: Sent) -> bool:
    return instant_us is not None and instant_us < sent.sent_us


def _cancel_of(plan: Change, path: str, body: Any) -> tuple[str, str, Any]:
    """Method, path and body of a cancel, from the path and body of the change."""
    if plan.how in ("batch", "atomic"):
        return "POST", path.replace("/add", "/cancel"), body
    path = path.removesuffix(f"/{plan.how}") + "/cancel"
    operation = {"operation": plan.how} if plan.how in CLEARS else {}
    return "POST", path, body | operation


def _request_of(changed: Changed, items: Sequence[Item]) -> tuple[str, str, Any, dict[str, str]]:
    """Method, path, body and headers."""
    plan = changed.plan
    base = f"/v1/namespaces/{plan.namespace}"
    headers = {} if plan.key is None else {"idempotency-key": plan.key}
    token: dict[str, Any] = {}
    bound = {} if plan.at_most is None else {"at_most": plan.at_most}
    if plan.key is None:
        token = {"idempotency_token": _token(plan.nonce, changed.token_us)}
    if plan.how == "batch":
        adds = [
            {
                "counter": counter,
                "delta": delta,
                **bound,
                "idempotency_token": _token(plan.nonce * 1_000 + place, changed.token_us),
            }
            for place, (counter, delta) in enumerate(plan.items)
        ]
        return "POST", f"{base}/batch/add", {"items": adds}, headers
    if plan.how == "atomic":
        pairs = [{"counter": item.counter, "delta": item.delta, **bound} for item in items]
        return "POST", f"{base}/atomic/add", token | {"items": pairs}, headers
    ((counter, delta),) = plan.items
    body = token if plan.how in CLEARS else token | {"delta": delta, **bound}
    if plan.how == "delete":
        return "DELETE", f"{base}/counters/{counter}", body, headers
    return "POST", f"{base}/counters/{counter}/{plan.how}", body, headers


def _token(nonce: int, time_us: int) -> dict[str, str]:
    return {"token": str(uuid.UUID(int=nonce + 1)), "generation_time": to_rfc3339(time_us)}
