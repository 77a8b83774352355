"""What the writer knows to be committed: counters' ids, and the sums of the live tail.

The tail is the events that no checkpoint holds yet. They lie in time order on disk, all counters
mixed, so that a commit touches few pages; what one counter has of them is kept here, a sum a
window. All of it is bounded, and forgetting is safe: the events are asked instead.

Only the writer's thread changes it; the event loop's thread reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from counter.types import Event, Fold, Namespace
from counter.windows import window_of

_IDS_MAX: Final = 50_000
_SUMS_MAX: Final = 100_000
_NONE: Final[Mapping[str, int | None]] = {}


class Ids:
    """Counters' ids by namespace and name. What a transaction learns counts once it commits."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}
        self._count = 0
        self._fresh: list[tuple[int, str, int]] = []

    def of(self, namespace_id: int) -> Mapping[str, int]:
        """Names and ids of a namespace's counters."""
        return self._known.setdefault(namespace_id, {})

    def learn(self, namespace_id: int, name: str, counter_id: int) -> None:
        self._fresh.append((namespace_id, name, counter_id))

    def commit(self) -> None:
        if not self._fresh:
            return
        if self._count + len(self._fresh) > _IDS_MAX:
            self._known, self._count = {}, 0
        for namespace_id, name, counter_id in self._fresh:
            self._known.setdefault(namespace_id, {})[name] = counter_id
        self._count += len(self._fresh)
        self._fresh = []

    def rollback(self) -> None:
        self._fresh = []


class LiveTail:
    """Sums of committed events by namespace, window and counter; None where a clear is among them.

    A counter that stands in a window has its mark there too.
    """

    def __init__(self) -> None:
        self._windows: dict[int, dict[int, dict[str, int | None]]] = {}
        #: From which instant on a namespace's windows are held whole.
        self._held_from: dict[int, int] = {}
        self._count = 0
        self._fresh: list[tuple[Namespace, Sequence[Event]]] = []
        self._expected: list[tuple[Namespace, Sequence[Event]]] = []

    def begin(self, namespace_id: int, from_us: int) -> None:
        """Nothing is committed at or after *from_us* but what will be told."""
        self._held_from[namespace_id] = from_us
        self._windows.setdefault(namespace_id, {})

    def window(self, namespace_id: int, window_us: int) -> Mapping[str, int | None]:
        """What is known of a window, whole or not."""
        return self._windows.get(namespace_id, {}).get(window_us, _NONE)

    def expect(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """*events* are about to be written; which of them are new is told after it."""
        self._expected.append((namespace, events))

    def tell(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """*events* are new in the transaction under way."""
        self._fresh.append((namespace, events))

    def commit(self) -> None:
        for namespace, events in self._fresh:
            self.add(namespace.id, namespace.settings.rollup_window_us, events)
        self._fresh, self._expected = [], []
        while self._count > _SUMS_MAX:
            self._drop_largest()

    def rollback(self) -> None:
        """The transaction failed, and nobody knows how far: a commit that reports an error may be
        on disk. The windows that it was about are read from the events from now on."""
        for namespace, events in self._expected:
            self.forget(namespace.id, max(event[1] for event in events))
        self._fresh, self._expected = [], []

    def add(self, namespace_id: int, size_us: int, events: Iterable[Event]) -> None:
        """Take committed events in."""
        windows = self._windows.setdefault(namespace_id, {})
        start_us = end_us = 0
        sums: dict[str, int | None] = {}
        for name, time_us, _, _, delta, clear, _ in events:
            if not start_us <= time_us < end_us:
                start_us = window_of(time_us, size_us)
                end_us = start_us + size_us
                sums = windows.setdefault(start_us, {})
            if name not in sums:
                self._count += 1
                sums[name] = None if clear else delta
            else:
                before = sums[name]
                sums[name] = None if before is None or clear else before + delta

    def tail(self, namespace_id: int, size_us: int, counter: str, after_us: int) -> Fold | None:
        """The fold of a counter's events after *after_us*; None where that must be read."""
        held_us = self._held_from.get(namespace_id)
        if held_us is None or after_us + 1 < held_us or (after_us + 1) % size_us:
            return None
        total = 0
        for window_us, sums in list(self._windows.get(namespace_id, {}).items()):
            if window_us > after_us:
                part = sums.get(counter, 0)
                if part is None:
                    return None
                total += part
        return Fold(False, total)

    def forget(self, namespace_id: int, through_us: int) -> None:
        """Windows up to *through_us* are in the checkpoints: nobody asks for them any more."""
        windows = self._windows.get(namespace_id)
        if windows is None:
            return
        # First the bound, then the sums: a reader in between reads the events instead.
        self._held_from[namespace_id] = max(self._held_from.get(namespace_id, 0), through_us + 1)
        for window_us in [start_us for start_us in windows if start_us <= through_us]:
            self._count -= len(windows.pop(window_us))

    def forget_namespace(self, namespace_id: int) -> None:
        self._held_from.pop(namespace_id, None)
        for sums in self._windows.pop(namespace_id, {}).values():
            self._count -= len(sums)

    def _drop_largest(self) -> None:
        """Let go of the namespace that holds most, up to the last window it has."""
        sizes = {key: sum(map(len, windows.values())) for key, windows in self._windows.items()}
        largest = max(sizes, key=lambda key: sizes[key])
        self.forget(largest, max(self._windows[largest]))
