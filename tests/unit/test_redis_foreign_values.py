"""A value of another kind under one key is no failure of the server, which serves other keys."""

from collections.abc import Sequence
from typing import Any

import pytest
from hiredis import ReplyError

from counter.errors import CacheUnavailableError
from counter.storage.redis import cache
from counter.storage.shared.cache_entries import Change, Note
from counter.storage.shared.cache_lane import BatchRefusedError
from counter.types import Guarded

WRONG_TYPE = ReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
NO_NUMBER = ReplyError("ERR value is not an integer or out of range")
READ_ONLY = ReplyError("READONLY You can't write against a read only replica.")


class Answering:
    """A connection that answers all commands with *replies*."""

    def __init__(self, *replies: Any) -> None:
        self._replies = replies

    def exchange(self, commands: Sequence[Any]) -> Sequence[Any]:
        assert len(commands) == len(self._replies)
        return self._replies


@pytest.mark.parametrize("reply", [WRONG_TYPE, NO_NUMBER])
def test_a_change_of_it_is_refused_alone(reply: ReplyError) -> None:
    """Regression: all best-effort counters were refused for a second."""
    changes = [Change(b"a", 1), Change(b"b", 1), Change(b"c", None)]
    first, found, last = cache._change(Answering(5, reply, 1), changes)  # type: ignore[arg-type]
    assert (first, last) == (5, 0)
    assert isinstance(found, CacheUnavailableError)
    assert "was not made: clear the counter" in found.detail


def test_a_token_under_such_a_key_is_not_guarded() -> None:
    notes = [Note(b"a", 1, b"x"), Note(b"b", 1, b"x")]
    found = cache._note(Answering(WRONG_TYPE, None), notes)  # type: ignore[arg-type]
    assert found == [Guarded.UNVERIFIED, Guarded.NEW]


def test_a_ping_of_such_a_key_finds_that_the_server_works() -> None:
    cache._ping(Answering(WRONG_TYPE), [b"a"])  # type: ignore[arg-type]


def test_a_refusal_of_the_server_is_a_failure() -> None:
    with pytest.raises(BatchRefusedError, match="READONLY"):
        cache._change(Answering(NO_NUMBER, READ_ONLY), [Change(b"a", 1)] * 2)  # type: ignore[arg-type]
    with pytest.raises(BatchRefusedError, match="READONLY"):
        cache._ping(Answering(READ_ONLY), [b"a"])  # type: ignore[arg-type]
