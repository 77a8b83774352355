"""What processes agree on by the store: namespaces, slices, leases of work, API keys.

Kept apart from :mod:`counter.ports`, which has the rules that adapters keep, and joins all of it in
its ``Store``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from counter.keys import ApiKey
from counter.types import Dataset, Namespace, NamespaceSettings, Slice, TokenBlock


class ControlPlane(Protocol):
    """Namespaces, datasets and slices."""

    async def datasets(self) -> Sequence[Dataset]: ...

    async def namespaces(self) -> Sequence[Namespace]:
        """All namespaces, by name."""
        ...

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        """The new namespace; None if the name is taken. Its shards' watermarks are laid at
        :func:`counter.windows.first_watermark`. Raises UnavailableError while another process may
        acknowledge adds for a deleted namespace of that name."""
        ...

    async def update_namespace(
        self, namespace: Namespace, settings: NamespaceSettings, era_from_us: int
    ) -> Namespace | None:
        """The namespace with *settings*, the accept limit holding from *era_from_us* in place of
        any that was to hold from then or later; None if its version is no longer *namespace*'s."""
        ...

    async def delete_namespace(self, namespace: Namespace) -> bool:
        """Forget the namespace; its data follow in the background. False if the version moved.
        From then on its adds and reads of its watermarks raise NamespaceUnknownError."""
        ...

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        """Names of counters in code point order, after *after*: all that were ever written."""
        ...

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        """The slices that are not dropped, earliest first."""
        ...

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        """Make those of *slices*, and their tables, that do not exist, all together where the store
        has transactions. One that ends at or before ``dropped_before`` is not made again: it would
        answer "not found"."""
        ...

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        """Note the instant at which every watermark had passed the slice's end; the first stays."""
        ...

    async def drop_slice(self, dataset: Dataset, start_us: int) -> None:
        """Move ``dropped_before`` to the slice's end, then drop its table. Earliest first."""
        ...

    async def dropped_before(self, dataset: Dataset) -> int:
        """Events earlier than this instant are gone; 0 while none is."""
        ...

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        """*count* sequence numbers that are leased to nobody else, ever: later leases are higher,
        and their time is *now_us*, or that of the latest lease where this is later."""
        ...

    async def purge(self, now_us: int) -> bool:
        """Delete a bounded amount of what nobody can ask for any more: data of deleted namespaces,
        expired keys, resolutions that outlived their events. True if there is more to do."""
        ...


class LeaseStore(Protocol):
    """Which workers live: each has one lease, a row that expires. Leases only spare duplicate work:
    nothing that is written depends on them."""

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        """Say that *worker* lives for another *ttl_us*."""
        ...

    async def leave(self, worker: str) -> None:
        """Forget *worker*, as if its time were over."""
        ...

    async def workers(self) -> Sequence[str]:
        """All workers that live, in order."""
        ...


class KeyStore(Protocol):
    """API keys. One that was made stays on record when it is revoked or expires, until it is
    forgotten; each changes by compare-and-set."""

    async def api_keys(self) -> Sequence[ApiKey]:
        """All keys on record, by (made at, id)."""
        ...

    async def create_api_key(self, key: ApiKey) -> bool:
        """Put *key* on record; False if its id is taken. When it was last used is not taken."""
        ...

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        """Replace *old* by *new*, of the same id; False if what is on record is not *old* any more.
        When they were last used is neither compared nor changed."""
        ...

    async def forget_api_key(self, key: ApiKey) -> bool:
        """Take *key* off the record; False if what is there is not *key*."""
        ...

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        """Note of each (id, instant) that the key was used then; an earlier instant changes
        nothing, and neither does an id that is not on record."""
        ...
