"""An API key as the JSON document that is stored of it, beside its id and when it was last used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from counter.types import ApiKey, Scope

_APART: Final = ("id", "last_used_us")
_KNOWN: Final = frozenset(each.name for each in fields(ApiKey)) - {*_APART}


def key_document(key: ApiKey) -> str:
    """What is stored of *key*."""
    body = {name: getattr(key, name) for name in sorted(_KNOWN)}
    return json.dumps(body | {"digest": key.digest.hex(), "scope": key.scope.name})


def key_from(key_id: str, document: str, used_us: int | None) -> ApiKey:
    """The key of a row. What a later version of this program put there besides is left out."""
    read: dict[str, Any] = json.loads(document)
    body = {name: value for name, value in read.items() if name in _KNOWN}
    body["digest"] = bytes.fromhex(body["digest"])
    body["scope"] = Scope[body["scope"]]
    body["namespaces"] = tuple(body["namespaces"])
    return ApiKey(key_id, last_used_us=used_us, **body)


class KeyReader:
    """Reads the same rows again and again: those that have not changed are not parsed anew."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, int | None, ApiKey]] = {}

    def keys(self, rows: Iterable[tuple[str, str, int | None]]) -> Sequence[ApiKey]:
        """The keys of all *rows*, by (made at, id)."""
        before, self._latest = self._latest, {}
        for key_id, document, used_us in rows:
            known = before.get(key_id)
            if known is None or known[:2] != (document, used_us):
                known = document, used_us, key_from(key_id, document, used_us)
            self._latest[key_id] = known
        keys = [key for _, _, key in self._latest.values()]
        return sorted(keys, key=lambda each: (each.created_at_us, each.id))
