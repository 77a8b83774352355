"""Keep API keys in the memory of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counter.types import ApiKey


class MemoryKeys:
    """:class:`counter.ports.KeyStore`."""

    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}

    async def api_keys(self) -> Sequence[ApiKey]:
        return sorted(self._keys.values(), key=lambda each: (each.created_at_us, each.id))

    async def create_api_key(self, key: ApiKey) -> bool:
        if key.id in self._keys:
            return False
        self._keys[key.id] = replace(key, last_used_us=None)
        return True

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        stored = self._keys.get(old.id)
        if stored is None or stored != old:
            return False
        self._keys[old.id] = replace(new, last_used_us=stored.last_used_us)
        return True

    async def forget_api_key(self, key: ApiKey) -> bool:
        if self._keys.get(key.id) != key:
            return False
        del self._keys[key.id]
        return True

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        for key_id, used_us in uses:
            stored = self._keys.get(key_id)
            if stored is not None:
                last_us = max(used_us, stored.last_used_us or 0)
                self._keys[key_id] = replace(stored, last_used_us=last_us)
