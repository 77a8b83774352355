"""The operations of a connection, each on a batch, with few round trips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from counter.errors import CounterError
from counter.storage.memcached.connection import NO_NUMBER, MemcachedConnection
from counter.storage.shared.cache_entries import Change, Entry, Note, pack_count, unpack_count
from counter.types import Guarded

#: A round fails if another process changed the same key.
_ROUNDS_MAX: Final = 20
_STORED: Final = b"STORED"
_NOT_FOUND: Final = b"NOT_FOUND"
_MODULUS: Final = 2**64
#: memcached counts without a sign. This far up, there is room below 0, and all values that are not
#: enormous have the same number of digits: they are changed in place. And they stay below 2**63,
#: from where on memcached 1.6.18, Debian 12's, may find a number's memory to hold no number: it
#: looks for a minus sign, and goes on past the number into what its memory held before.
_ZERO: Final = 2**62
_SIGN: Final = 2**63


class ContentionError(Exception):
    """Other processes changed the same keys repeatedly; the changes were not made."""


def read(connection: MemcachedConnection, keys: Sequence[bytes]) -> Sequence[bytes | None]:
    """Return the value of each key."""
    found = connection.get_many(dict.fromkeys(keys))
    return [found.get(key) for key in keys]


def put(connection: MemcachedConnection, entries: Sequence[Entry]) -> Sequence[None]:
    """Store each count unless a newer one is stored."""
    newest: dict[bytes, Entry] = {}
    for entry in entries:
        other = newest.get(entry.key)
        if other is None or other.checkpoint.time_us <= entry.checkpoint.time_us:
            newest[entry.key] = entry
    for _ in range(_ROUNDS_MAX):
        if not newest:
            break
        current = connection.gets_many(newest)
        commands = _replacements(newest, current)
        answers = connection.pipeline(list(commands.values()))
        newest = {
            key: newest[key]
            for key, answer in zip(commands, answers, strict=True)
            if answer != _STORED
        }
    return [None] * len(entries)


def _replacements(
    newest: Mapping[bytes, Entry], current: Mapping[bytes, tuple[bytes, bytes]]
) -> Mapping[bytes, bytes]:
    """Return by key the command that replaces what was read there; it does nothing if another
    process has changed it meanwhile."""
    commands: dict[bytes, bytes] = {}
    for key, (_, ttl_s, checkpoint) in newest.items():
        value = pack_count(checkpoint)
        if key not in current:
            commands[key] = b"add %b 0 %d %d\r\n%b\r\n" % (key, ttl_s, len(value), value)
            continue
        found, version = current[key]
        other = unpack_count(found)
        if other is None or other.time_us <= checkpoint.time_us:
            commands[key] = _replacement(key, ttl_s, value, version)
    return commands


def _replacement(key: bytes, ttl_s: int, value: bytes, version: bytes) -> bytes:
    """Return the command that replaces what was read with *value*."""
    return b"cas %b 0 %d %d %b\r\n%b\r\n" % (key, ttl_s, len(value), version, value)


def note(connection: MemcachedConnection, notes: Sequence[Note]) -> Sequence[Guarded]:
    """Store each fingerprint if there is none, and return what was stored before."""
    answers = connection.pipeline(
        [
            b"add %b 0 %d %d\r\n%b\r\n" % (key, ttl_s, len(payload), payload)
            for key, ttl_s, payload in notes
        ]
    )
    known = [each.key for each, answer in zip(notes, answers, strict=True) if answer != _STORED]
    found = connection.get_many(dict.fromkeys(known)) if known else {}
    return [
        # What is not found was evicted between the two round trips.
        Guarded.NEW if answer == _STORED else each.compared(found.get(each.key))
        for each, answer in zip(notes, answers, strict=True)
    ]


def change(
    connection: MemcachedConnection, changes: Sequence[Change]
) -> Sequence[int | CounterError]:
    """Make each change, and return the value after it. Raises ContentionError.

    memcached goes on at the other end of 64 bits. A change that did is undone and refused: in this
    arithmetic the values of the other changes are what they were without it.
    """
    values: list[int | CounterError] = []
    undone: dict[bytes, int] = {}
    for each, found in zip(changes, _changed(connection, changes), strict=True):
        key, delta = each
        if isinstance(found, CounterError):
            values.append(found)
            continue
        if delta is None:
            undone.pop(key, None)
            values.append(0)
            continue
        value = _wrapped(found - undone.get(key, 0))
        if _wrapped(value - delta) == value - delta:
            values.append(value)
        else:
            undone[key] = undone.get(key, 0) + delta
            values.append(each.refusal("memcached"))
    _undo(connection, [Change(key, -delta) for key, delta in undone.items()])
    return values


def _undo(connection: MemcachedConnection, changes: Sequence[Change]) -> None:
    """Make *changes* of those counters that are not gone meanwhile. Raises ContentionError."""
    for _ in range(_ROUNDS_MAX):
        if not changes:
            return
        answers = connection.pipeline([_first_try(each) for each in changes])
        unread = [index for index, answer in enumerate(answers) if answer == NO_NUMBER]
        lost = _add_here(connection, changes, unread, {}) if unread else []
        changes = [changes[index] for index in lost]
    raise ContentionError("changes beyond 64 bits could not be undone")


def _changed(
    connection: MemcachedConnection, changes: Sequence[Change]
) -> Sequence[int | CounterError]:
    """Make each change, and return the value after it, which has 64 bits, or why it is not made."""
    values: dict[int, int | CounterError] = {}
    waiting = list(range(len(changes)))
    for _ in range(_ROUNDS_MAX):
        answers = connection.pipeline([_first_try(changes[index]) for index in waiting])
        missing: list[int] = []
        unread: list[int] = []
        for index, answer in zip(waiting, answers, strict=True):
            if changes[index].delta is None:
                values[index] = 0
            elif answer == _NOT_FOUND:
                missing.append(index)
            elif answer == NO_NUMBER:
                unread.append(index)
            else:
                values[index] = unpack_value(answer)
        answers = connection.pipeline([_second_try(changes[index]) for index in missing])
        lost: list[int] = []
        for index, answer in zip(missing, answers, strict=True):
            if answer == _STORED:
                values[index] = changes[index].delta or 0
            else:
                lost.append(index)
        if unread:
            lost += _add_here(connection, changes, unread, values)
        if not lost:
            return [values[index] for index in range(len(changes))]
        waiting = lost
    raise ContentionError(f"{len(waiting)} counters were changed by others again and again")


def _add_here(
    connection: MemcachedConnection,
    changes: Sequence[Change],
    unread: Sequence[int],
    values: dict[int, int | CounterError],
) -> list[int]:
    """Make the changes that memcached cannot make itself because of large values.

    Put the value after each into *values*, or why it is not made; return those for which another
    process was faster.
    """
    current = connection.gets_many(dict.fromkeys(changes[index].key for index in unread))
    sums: dict[bytes, int] = {}
    foreign: set[bytes] = set()
    for key, (value, _) in current.items():
        try:
            sums[key] = unpack_value(value)
        except ValueError:
            foreign.add(key)
    for index in unread:
        key, delta = changes[index]
        if key in foreign:
            values[index] = changes[index].unreadable(
                "memcached", "the counter's value is no number"
            )
        elif key in sums:
            values[index] = sums[key] = unpack_value(pack_value(sums[key] + (delta or 0)))
    answers = connection.pipeline(
        [_replacement(key, 0, pack_value(sums[key]), current[key][1]) for key in sums]
    )
    done = {key for key, answer in zip(sums, answers, strict=True) if answer == _STORED} | foreign
    return [index for index in unread if changes[index].key not in done]


def _first_try(each: Change) -> bytes:
    if each.delta is None:
        return b"delete %b\r\n" % each.key
    return b"incr %b %d\r\n" % (each.key, increment_of(each.delta))


def _second_try(each: Change) -> bytes:
    """Create missing counters with their changes. They never expire, but may be evicted. If another
    process created one meanwhile, nothing happens."""
    value = pack_value(each.delta or 0)
    return b"add %b 0 0 %d\r\n%b\r\n" % (each.key, len(value), value)


def ask_version(connection: MemcachedConnection, questions: Sequence[bytes]) -> Sequence[bytes]:
    """Return whether it answers."""
    return connection.pipeline([b"version\r\n" for _ in questions])


def pack_value(number: int) -> bytes:
    """Return a best-effort value as memcached holds it."""
    return b"%d" % ((number + _ZERO) % _MODULUS)


def unpack_value(value: bytes) -> int:
    """Return the best-effort value that memcached holds as *value*."""
    return _wrapped(int(value) - _ZERO)


def increment_of(delta: int) -> int:
    """Return what to ``incr`` by for *delta*. A negative one goes the long way round, because
    ``decr`` stops at 0. So a counter has 64 bits, and past 2**63 - 1 it goes on at -2**63."""
    return delta % _MODULUS


def _wrapped(number: int) -> int:
    """Return *number* in signed 64 bits."""
    return (number + _SIGN) % _MODULUS - _SIGN
