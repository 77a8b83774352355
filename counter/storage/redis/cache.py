"""The cache in Redis or Valkey, 7.0 or newer: one server, whose commands are atomic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

from hiredis import ReplyError
from redis.connection import ConnectionPool

from counter import limits
from counter.errors import CounterError
from counter.ports import Clock
from counter.storage.redis.connection import Command, RedisConnection
from counter.storage.shared.cache_entries import Change, Entry, Note, pack_count
from counter.storage.shared.cache_lane import BatchRefusedError
from counter.storage.shared.remote_cache import Operations, RemoteCache
from counter.types import Guarded

#: Counts that one script stores: the server does nothing else meanwhile.
_SCRIPT_ITEMS: Final = 1_000
#: Store each count unless a newer one is stored: what is no count is replaced. Numbers of Lua are
#: exact up to 2**53, which is far more than any time; counts are text.
_PUT: Final = """
for i, key in ipairs(KEYS) do
    local found = redis.pcall('GET', key)
    local at = type(found) == 'string' and tonumber(string.match(found, '^(%d+) %-?%d+$'))
    if not at or at <= tonumber(ARGV[3 * i - 2]) or at > TIME_MAX then
        redis.call('SET', key, ARGV[3 * i - 1], 'EX', ARGV[3 * i])
    end
end
return 0
""".replace("TIME_MAX", str(limits.TIME_MAX_US))
_NO_NUMBER: Final = "ERR value is not an integer or out of range"
_WRONG_TYPE: Final = "WRONGTYPE "
_OVERFLOW: Final = "ERR increment or decrement would overflow"

_Answer = TypeVar("_Answer")


class RedisCache(RemoteCache[RedisConnection]):
    """:class:`counter.ports.Cache` over one Redis or Valkey server.

    *timeout_us* bounds a connect and each wait for an answer. A best-effort counter has 64 bits: a
    change that does not fit raises InvalidBodyError, and is not made.
    """

    def __init__(
        self,
        url: str,
        name: str,
        clock: Clock,
        *,
        timeout_us: int = 100 * limits.MILLISECOND,
        prefix: str = "counter",
    ) -> None:
        """*url* is redis-py's, which may hold a password; *name* is what messages show."""
        timeout_s = timeout_us / limits.SECOND
        pool = ConnectionPool.from_url(
            url,
            protocol=2,
            driver_info=None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        super().__init__(
            {f"redis at {name}": partial(RedisConnection, pool)},
            Operations(
                read=_read, put=_put, note=_note, change=_change, ping=_ping, unpack_value=int
            ),
            clock,
            timeout_us=timeout_us,
            prefix=prefix,
        )


def _read(connection: RedisConnection, keys: Sequence[bytes]) -> Sequence[bytes | None]:
    replies = connection.exchange([("MGET", *keys)])
    _require(replies, len(keys))
    found: Sequence[bytes | None] = replies[0]
    return found


def _put(connection: RedisConnection, entries: Sequence[Entry]) -> Sequence[None]:
    parts = [entries[at : at + _SCRIPT_ITEMS] for at in range(0, len(entries), _SCRIPT_ITEMS)]
    _require(connection.exchange([_put_command(each) for each in parts]), len(entries))
    return [None] * len(entries)


def _put_command(entries: Sequence[Entry]) -> Command:
    arguments: list[bytes | int] = []
    for _, ttl_s, checkpoint in entries:
        arguments += (checkpoint.time_us, pack_count(checkpoint), ttl_s)
    # With the script's text, because a server that was restarted does not know its hash.
    return ("EVAL", _PUT, len(entries), *(each.key for each in entries), *arguments)


def _note(connection: RedisConnection, notes: Sequence[Note]) -> Sequence[Guarded]:
    replies = connection.exchange(
        [("SET", key, payload, "NX", "GET", "EX", ttl_s) for key, ttl_s, payload in notes]
    )
    return _checked(
        replies,
        [_compared(note, reply) for note, reply in zip(notes, replies, strict=True)],
    )


def _compared(note: Note, reply: Any) -> Guarded | None:
    if isinstance(reply, ReplyError):
        return Guarded.UNVERIFIED if _is_foreign(reply) else None
    return note.compared(reply)


def _change(connection: RedisConnection, changes: Sequence[Change]) -> Sequence[int | CounterError]:
    replies = connection.exchange(
        [("DEL", key) if delta is None else ("INCRBY", key, delta) for key, delta in changes]
    )
    return _checked(replies, list(map(_changed, changes, replies)))


def _changed(change: Change, reply: Any) -> int | CounterError | None:
    """Return the value after *change*, or why it cannot be made; None if the server refused."""
    if not isinstance(reply, ReplyError):
        return 0 if change.delta is None else int(reply)
    if str(reply) == _NO_NUMBER or _is_foreign(reply):
        return change.unreadable("Redis", str(reply))
    return change.refusal("Redis") if str(reply) == _OVERFLOW else None


def _is_foreign(reply: Any) -> bool:
    """Return whether the key of a command holds what this cache never stores. That is no failure
    of the server, which serves other keys."""
    return isinstance(reply, ReplyError) and str(reply).startswith(_WRONG_TYPE)


def _ping(connection: RedisConnection, keys: Sequence[bytes]) -> Sequence[object]:
    """Write, because a read-only replica or a server whose memory is full answers reads."""
    replies = connection.exchange([("SET", key, "", "NX", "GET", "PX", 1_000) for key in keys])
    _require([each for each in replies if not _is_foreign(each)], len(keys))
    return replies


def _require(replies: Sequence[Any], items: int) -> None:
    """Raise BatchRefusedError for all *items* if a reply is an error."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise BatchRefusedError(_reason(reply), [None] * items)


def _checked(replies: Sequence[Any], answers: Sequence[_Answer | None]) -> Sequence[_Answer]:
    """Return *answers*. Raise BatchRefusedError if one is None."""
    if None in answers:
        raise BatchRefusedError(_reason(replies[answers.index(None)]), answers)
    return cast("Sequence[_Answer]", answers)


def _reason(error: ReplyError) -> str:
    text = str(error)
    return f"{text}; Redis 7.0 or newer is needed" if text == "ERR syntax error" else text
