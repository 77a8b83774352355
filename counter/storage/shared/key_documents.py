"""Convert API keys to and from the JSON documents in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from counter.api_keys import ApiKey, Scope

_APART: Final = ("id", "last_used_us")
_KNOWN: Final = frozenset(each.name for each in fields(ApiKey)) - {*_APART}


def key_document(key: ApiKey) -> str:
    """Return *key* as JSON, without its id and the time of its last use."""
    body = {name: getattr(key, name) for name in sorted(_KNOWN)}
    return json.dumps(body | {"digest": key.digest.hex(), "scope": key.scope.name})


def key_from(key_id: str, document: str, used_us: int | None) -> ApiKey:
    """Return the key of a row. Fields of later versions of this program are ignored."""
    read: dict[str, Any] = json.loads(document)
    body = {name: value for name, value in read.items() if name in _KNOWN}
    body["digest"] = bytes.fromhex(body["digest"])
    body["scope"] = Scope[body["scope"]]
    body["namespaces"] = tuple(body["namespaces"])
    return ApiKey(key_id, last_used_us=used_us, **body)


class KeyReader:
    """Read the same rows repeatedly, and parse only those that changed."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, int | None, ApiKey]] = {}

    def keys(self, rows: Iterable[tuple[str, str, int | None]]) -> Sequence[ApiKey]:
        """Return the keys of all *rows*, ordered by (created at, id)."""
        before, self._latest = self._latest, {}
        for key_id, document, used_us in rows:
            known = before.get(key_id)
            if known is None or known[:2] != (document, used_us):
                known = document, used_us, key_from(key_id, document, used_us)
            self._latest[key_id] = known
        keys = [key for _, _, key in self._latest.values()]
        return sorted(keys, key=lambda each: (each.created_at_us, each.id))
