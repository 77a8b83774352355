"""Define API keys, their text form, and the ring that looks up valid keys.

A key is ``ck_<id>_<secret>``. The id is public: lists, logs and errors name a key by it. The secret
is 160 bits from the system's random source, and is shown once; only its SHA-256 is stored. A slow
hash, as passwords need, would add nothing: 160 random bits cannot be guessed, however fast each try
is, and every request would pay for the slow hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from base64 import b32encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

from counter.api_keys import ApiKey
from counter.background import every
from counter.errors import CounterError, StoreUnavailableError
from counter.limits import MINUTE, SECOND

if TYPE_CHECKING:
    from counter.api_keys import KeyStore
    from counter.core.clock_guard import ClockGuard
    from counter.ports import Clock


#: If the keys could not be read for this long, all are rejected, because a key may have been
#: revoked meanwhile.
RING_AGE_MAX_US: Final = MINUTE
_TOO_OLD: Final = (
    f"API keys could not be read for over {RING_AGE_MAX_US // SECOND} s, and a key may have been"
    " revoked meanwhile: the store must be reachable again"
)
#: How often the keys are read, and how often their last use is stored.
_READ_EVERY_S: Final = 1.0
_NOTE_EVERY_S: Final = 60.0

_ID_CHARS: Final = 12
_SECRET_BYTES: Final = 20
_TEXT: Final = re.compile(rb"ck_([a-z2-7]{12})_([a-z2-7]{32})")
_ID: Final = re.compile(r"(?:ck_)?([a-z2-7]{12})(?:_[a-z2-7]*)?", re.ASCII)
_PATTERN: Final = re.compile(r"\*|[a-z][a-z0-9_-]{0,62}\*?", re.ASCII)
#: The digest that the secret of an unknown id is compared with, so that it takes as long as a wrong
#: secret.
_NO_DIGEST: Final = bytes(hashlib.sha256().digest_size)

_log = logging.getLogger("counter.keys")


def new_id() -> str:
    """Return a unique id: 60 random bits."""
    return _base32(secrets.token_bytes(8))[:_ID_CHARS]


def new_secret() -> str:
    """Return 160 random bits."""
    return _base32(secrets.token_bytes(_SECRET_BYTES))


def key_text(key_id: str, secret: str) -> str:
    """Return the key as its holder sends it."""
    return f"ck_{key_id}_{secret}"


def digest_of(secret: bytes) -> bytes:
    """Return the digest of a secret that is stored."""
    return hashlib.sha256(secret).digest()


def id_in(text: str) -> str | None:
    """Return the id in *text*: by itself, as ``ck_<id>``, or within a whole key."""
    found = _ID.fullmatch(text)
    return None if found is None else found[1]


def is_pattern(text: str) -> bool:
    """Return whether *text* is a valid namespace pattern of a key."""
    return _PATTERN.fullmatch(text) is not None


def covers(pattern: str, namespace: str) -> bool:
    """Return whether *pattern* matches *namespace*."""
    if pattern.endswith("*"):
        return namespace.startswith(pattern[:-1])
    return namespace == pattern


def _base32(random: bytes) -> str:
    return b32encode(random).decode("ascii").lower().rstrip("=")


class KeyRing:
    """All keys in memory, as of the last read of the store.

    Each process reads them again every second, so a change by another process holds here within
    about two. If the store cannot be read, the last read holds for RING_AGE_MAX_US; after that no
    key is considered valid, and :meth:`find` raises StoreUnavailableError until the store can be
    read again. A service that never had a key stays open.
    """

    def __init__(self, store: KeyStore, clock: Clock, guard: ClockGuard | None = None) -> None:
        self._store = store
        self._clock = clock
        self._guard = guard
        self._by_id: Mapping[bytes, ApiKey] = {}
        self._read_at_us: int | None = None
        self._next_end_us: int | None = None
        self._is_closed = False
        self._used: dict[str, int] = {}
        #: Whether requests need a key: from the first key ever created. Revoking or losing all keys
        #: does not open the service.
        self.required = False
        #: Changes whenever results of :meth:`find` may change, and once a minute while keys are in
        #: use. A caller that remembers a result calls again then, and that use of the key is
        #: recorded.
        self.version = 0

    @property
    def keys(self) -> Sequence[ApiKey]:
        """All stored keys."""
        return tuple(self._by_id.values())

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the valid key with the text *presented*; None if it is unknown, wrong, expired
        or revoked. Raises StoreUnavailableError if the last read of the keys is too old."""
        if self._is_too_old():
            raise StoreUnavailableError(_TOO_OLD, retry_after_us=SECOND)
        parts = _TEXT.fullmatch(presented)
        if parts is None:
            return None
        key = self._by_id.get(parts[1])
        is_same = compare_digest(digest_of(parts[2]), _NO_DIGEST if key is None else key.digest)
        if key is None or not is_same:
            return None
        now_us = self._clock.now_us()
        if not key.is_valid_at(now_us):
            return None
        if self._guard is None or self._guard.trouble is None:
            # The latest use is stored, so a time from the future would never be replaced.
            self._used[key.id] = now_us
        return key

    @property
    def trouble(self) -> str | None:
        """Why all requests are rejected; None while valid keys are accepted."""
        return _TOO_OLD if self.required and self._is_too_old() else None

    def allows(self, key: ApiKey, namespace: str) -> bool:
        """Return whether *key* covers *namespace*."""
        return any(covers(pattern, namespace) for pattern in key.namespaces)

    async def refresh(self) -> None:
        """Read all keys again."""
        began_us = self._clock.boottime_us()
        found = {key.id.encode("ascii"): key for key in await self._store.api_keys()}
        if self._read_at_us is not None and began_us < self._read_at_us:
            # A later read finished first.
            return
        is_first, self._read_at_us = self._read_at_us is None, began_us
        if found != self._by_id:
            if not is_first:
                self._log_changes(found)
            self._by_id = found
            self.required |= bool(found)
            self._move_on()
        self._settle()

    async def run(self, stop: asyncio.Event) -> None:
        """Read the keys again every second until *stop* is set, and store their last uses.

        In separate loops: a read that hangs must not delay the expiry of keys or of the ring, nor
        storing many uses the rejection of a revoked key.
        """
        loops = [
            asyncio.create_task(every(seconds, work, stop, _log, what))
            for seconds, work, what in (
                (_READ_EVERY_S, self.refresh, "reading the API keys"),
                (_NOTE_EVERY_S, self._save_uses, "storing the last uses of API keys"),
            )
        ]
        try:
            await every(_READ_EVERY_S, self._settle, stop, _log, "checking the API keys")
        finally:
            for each in loops:
                each.cancel()
            # Uses whose recording is cancelled here are recorded below.
            await asyncio.gather(*loops, return_exceptions=True)
        with suppress(CounterError):
            await self._save_uses()

    async def _save_uses(self) -> None:
        used, self._used = self._used, {}
        if not used:
            return
        self.version += 1
        try:
            await self._store.note_api_key_uses(list(used.items()))
        except (CounterError, asyncio.CancelledError):
            self._used = used | self._used
            raise

    def _is_too_old(self) -> bool:
        read_us = self._read_at_us
        return read_us is None or self._clock.boottime_us() - read_us > RING_AGE_MAX_US

    def _settle(self) -> None:
        """Apply changes that only time causes: expired keys, a ring that is too old."""
        if self._next_end_us is not None and self._next_end_us <= self._clock.now_us():
            self._move_on()
        is_closed = self.required and self._is_too_old()
        if is_closed != self._is_closed:
            self._is_closed = is_closed
            self.version += 1
            if is_closed:
                _log.error(
                    "API keys could not be read for too long: all requests are rejected until"
                    " they can be read"
                )
            else:
                _log.warning("API keys could be read again")

    def _move_on(self) -> None:
        """Invalidate remembered results, now and when the next key expires."""
        self.version += 1
        now_us = self._clock.now_us()
        ends = (each.ends_at_us() for each in self._by_id.values())
        self._next_end_us = min((each for each in ends if each and each > now_us), default=None)

    def _log_changes(self, found: Mapping[bytes, ApiKey]) -> None:
        if not found:
            _log.error("no API keys exist; all requests are rejected until one is created")
        for key_id, key in found.items():
            before = self._by_id.get(key_id)
            if before is None:
                _log.info("API key %s was made", key.id)
            elif before != key:
                what = "changed" if key.revoked_at_us is None else "revoked"
                _log.info("API key %s was %s", key.id, what)
