"""Define API keys, and what is needed of the store that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


class Scope(IntEnum):
    """What a key allows; each scope includes the ones before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as stored. Rates are per second and process; 0 means no bound, and None means the
    settings' default.

    ``digest`` is the SHA-256 of the secret. ``namespaces`` are names, prefixes of names that end in
    ``*``, or ``*``. ``replaced_by`` is the id of the key that this one was rotated to.
    """

    id: str
    label: str
    digest: bytes = field(repr=False)
    namespaces: tuple[str, ...]
    scope: Scope
    created_at_us: int
    expires_at_us: int | None = None
    revoked_at_us: int | None = None
    #: Accurate to about two minutes. Not part of the key's identity: comparisons ignore it.
    last_used_us: int | None = field(default=None, compare=False)
    requests_per_s: float | None = None
    adds_per_s: float | None = None
    reservations_per_s: float | None = None
    resolutions_per_s: float | None = None
    replaced_by: str | None = None

    def ends_at_us(self) -> int | None:
        """Return the instant from which the key is no longer valid; None if there is none."""
        ends = [each for each in (self.expires_at_us, self.revoked_at_us) if each is not None]
        return min(ends, default=None)

    def is_valid_at(self, now_us: int) -> bool:
        """Return whether the key is neither revoked nor expired."""
        expires_us = self.expires_at_us
        return self.revoked_at_us is None and (expires_us is None or now_us < expires_us)


class KeyStore(Protocol):
    """API keys. A key stays stored when it is revoked or expires, until it is deleted; keys are
    changed by compare-and-set."""

    async def api_keys(self) -> Sequence[ApiKey]:
        """Return all stored keys, by (made at, id)."""
        ...

    async def create_api_key(self, key: ApiKey) -> bool:
        """Store *key* without its last use; return False if its id is in use."""
        ...

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        """Replace *old* by *new*, of the same id; return False if the stored key is not *old*. Last
        uses are neither compared nor changed."""
        ...

    async def forget_api_key(self, key: ApiKey) -> bool:
        """Delete *key*; return False if the stored key differs."""
        ...

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        """Record the last use of each (id, instant); earlier instants and unknown ids change
        nothing."""
        ...
