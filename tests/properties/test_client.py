"""Every result of a client is true, whatever is lost, late, repeated, full or killed."""

from typing import Any

import pytest
from hypothesis import settings

from counter_client import buffer, delivery, retrying, spool, transport
from counter_client.aio import AsyncHold
from counter_client.delivery import Backlog
from counter_client.errors import StoreUnavailableError
from counter_client.failures import UnreachableError
from tests.properties.client_world import run
from tests.properties.seeds import Fault, check_seeds, is_found, planted

#: Failing seeds are printed: ``run(seed).wrong`` has the problems.
SEEDS = settings().max_examples // 5
SITUATIONS = frozenset(
    {
        *("answer lost", "request lost", "refused", "repeated", "outage", "page of a proxy"),
        *("overloaded", "rate_limited", "namespace_unknown", "in future", "forgotten"),
        *("void", "pending", "replayed", "write timed out", "disk full", "buffer full"),
        *("killed at a time", "killed before a statement", "killed in a commit"),
        "killed while it sends",
        *("hedged", "retried"),
        *("hold settled", "hold released", "hold expired", "end timed out"),
        *("flushed", "synced", "unsent", "unsent at the end", "unknown outcome", "not sent"),
        *("rejected on disk", "resolved True", "resolved False", "spool cannot be opened"),
    }
)


def test_every_result_of_a_client_is_true() -> None:
    check_seeds(run, SEEDS, SITUATIONS)


def lose_new_tokens(patch: pytest.MonkeyPatch) -> None:
    """New tokens are used before they are on disk."""
    patch.setattr(spool.Slot, "renew", Backlog.renew)


def send_before_saving(patch: pytest.MonkeyPatch) -> None:
    """A piece is sent before it is on disk."""
    patch.setattr(spool.Slot, "_save_sealed", Backlog._save_sealed)


def ignore_full_disks(patch: pytest.MonkeyPatch) -> None:
    """A write that failed is taken for one that did not."""
    write = spool.Slot._write

    def careless(self: spool.Slot, statements: Any) -> None:
        try:
            write(self, statements)
        except StoreUnavailableError:
            return

    patch.setattr(spool.Slot, "_write", careless)


def believe_refused_retries(patch: pytest.MonkeyPatch) -> None:
    """A refused retry is taken for the end of the attempt before it."""
    patch.setattr(retrying, "decides", lambda _: True)


def believe_a_refused_hedge(patch: pytest.MonkeyPatch) -> None:
    """A refusal by one server ends the request to the other."""
    patch.setattr(transport, "_REFUSES", transport._DECIDES)


def take_cut_requests_for_unsent(patch: pytest.MonkeyPatch) -> None:
    """A request with a lost response is taken for one that was never sent."""
    arrived = retrying.may_have_arrived

    def forgetful(error: Any) -> bool:
        return arrived(error) and not isinstance(error, UnreachableError)

    for module in (retrying, delivery):
        patch.setattr(module, "may_have_arrived", forgetful)


def flush_too_early(patch: pytest.MonkeyPatch) -> None:
    """A flush does not wait for the piece that is being sent."""
    flushed = buffer.Merging.record_finished

    def early(self: buffer.Merging, rejected: Any) -> None:
        flushed(self, rejected)
        self.finished += 1

    patch.setattr(buffer.Merging, "record_finished", early)


def settle_too_early(patch: pytest.MonkeyPatch) -> None:
    """A settle returns before there is an answer."""

    async def early(self: AsyncHold, call: Any) -> None:
        self._ending = self._background.start(call)

    patch.setattr(AsyncHold, "_end", early)


FAULTS: list[tuple[Fault, int]] = [
    (lose_new_tokens, 31),
    (send_before_saving, 2),
    (ignore_full_disks, 2),
    (believe_refused_retries, 53),
    (believe_a_refused_hedge, 109),
    (take_cut_requests_for_unsent, 14),
    (flush_too_early, 2),
    (settle_too_early, 1),
]


@planted(FAULTS)
def test_a_planted_fault_is_found(fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert is_found(run, seed)
