"""A history as lines to read."""

from counter.limits import MILLISECOND, SECOND
from tests.simulation.history import Changed, History, Seen, Sent


def trace_of(history: History, start_us: int) -> list[str]:
    """Every request and every count that was read, by the seconds since *start_us*."""
    sends = [
        _send_line(changed, sent, start_us)
        for changed in history.changes
        for sent in changed.requests
    ]
    return sorted([*sends, *(_read_line(seen, start_us) for seen in history.reads)])


def _send_line(changed: Changed, sent: Sent, start_us: int) -> str:
    took_ms = ((sent.answered_us or sent.sent_us) - sent.sent_us) / MILLISECOND
    plan = changed.plan
    outcome = sent.body.get("code") or f"replayed {sent.body.get('replayed')}"
    if "was_counted" in sent.body:
        outcome = f"cancelled, was counted {sent.body['was_counted']}"
    if sent.body.get("applied") is not None:
        outcome += f", applied {sent.body['applied']}"
    return (
        f"{(sent.sent_us - start_us) / SECOND:10.6f} s  change {plan.number} {plan.how}"
        f" {plan.namespace} {plan.items} of {(changed.token_us - start_us) / SECOND:.6f}"
        f" on api-{sent.api}: {sent.status} {outcome} after {took_ms:g} ms"
    )


def _read_line(seen: Seen, start_us: int) -> str:
    return (
        f"{(seen.sent_us - start_us) / SECOND:10.6f} s  {seen.accuracy} read of"
        f" {seen.namespace}/{seen.counter} on api-{seen.plan.api}: {seen.count} as of"
        f" {(seen.as_of_us - start_us) / SECOND:.6f}, answered"
        f" {(seen.answered_us - start_us) / SECOND:.6f}"
    )
