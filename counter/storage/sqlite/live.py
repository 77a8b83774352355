"""Cache committed data for the writer: counters' ids, and the sums of the live tail.

The tail is the events that no checkpoint includes yet. On disk they are in time order, with all
counters mixed, so that a commit touches few pages; here are the sums of each counter, one per
window. The caches are bounded, and a missing entry is safe: the events are read instead.

Only the writer's thread changes it. The event loop's thread reads the tail, under the lock that
each change holds from its first step to its last: a read sees the tail between two changes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from counter.types import Event, Fold, Namespace, Span
from counter.windows import window_of

_IDS_MAX: Final = 50_000
#: About half a million sums.
_TAIL_BYTES_MAX: Final = 64 * 1024 * 1024
#: A sum in memory, besides the characters of its counter's name.
_SUM_BYTES: Final = 130


class Ids:
    """Counters' ids by namespace and name. Ids of a transaction are valid after its commit."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}
        self._count = 0
        self._fresh: list[tuple[int, str, int]] = []

    def of(self, namespace_id: int) -> Mapping[str, int]:
        """Return names and ids of a namespace's counters."""
        return self._known.setdefault(namespace_id, {})

    def learn(self, namespace_id: int, name: str, counter_id: int) -> None:
        self._fresh.append((namespace_id, name, counter_id))

    def forget(self, namespace_id: int, name: str) -> None:
        """Have the next event of a counter look its name up again; at once, not at the commit."""
        if self._known.get(namespace_id, {}).pop(name, None) is not None:
            self._count -= 1
        self._fresh = [each for each in self._fresh if each[:2] != (namespace_id, name)]

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


class _Window:
    """Sums of one window by counter; None if a clear is among the events."""

    __slots__ = ("bytes", "sums")

    def __init__(self) -> None:
        self.sums: dict[str, int | None] = {}
        #: Their approximate memory.
        self.bytes = 0


class LiveTail:
    """Sums of committed events by namespace, window and counter.

    From an instant on, a namespace's sums are complete; earlier events must be read from the log.
    So a window that may lack an event is forgotten, with all before it. Windows are also forgotten
    when checkpoints include them, and, above the memory limit, the oldest ones of the largest
    namespace.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[int, dict[int, _Window]] = {}
        #: The instant from which on a namespace's windows are complete.
        self._held_from: dict[int, int] = {}
        #: The approximate memory of all windows.
        self._bytes = 0
        #: What is new in the current transaction, in order.
        self.written: list[tuple[Namespace, Sequence[Event]]] = []
        self._expected: list[tuple[Namespace, Sequence[Event]]] = []

    def begin(self, namespace_id: int, from_us: int) -> None:
        """Declare that later events at or after *from_us* will all be passed to :meth:`note`."""
        with self._lock:
            self._held_from[namespace_id] = from_us
            self._windows.setdefault(namespace_id, {})

    def counters(self, namespace_id: int, size_us: int, span: Span) -> dict[int, list[str]] | None:
        """Return the counters with events in each window of *span*, all as of one commit; None if
        they must be read from the log."""
        with self._lock:
            held_us = self._held_from.get(namespace_id)
            if held_us is None or span.windows(size_us).start < held_us:
                return None
            windows = self._windows.get(namespace_id, {})
            return {
                start_us: list(window.sums)
                for start_us, window in windows.items()
                if span.from_us <= start_us < span.to_us
            }

    def expect(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Note that *events* are about to be written; :meth:`note` then gets the new ones of
        them."""
        self._expected.append((namespace, events))

    def note(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Note that *events* are new in the current transaction."""
        self.written.append((namespace, events))

    def note_removed(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Note that *events* are removed in the current transaction. Without a clear a sum stays
        unknown: what it erased is read from the log."""
        self.note(namespace, [event._replace(delta=-event.delta) for event in events])

    def commit(self) -> None:
        """Add all events of the transaction, and take away the removed ones, in one step for
        readers."""
        try:
            with self._lock:
                for namespace, events in self.written:
                    self._add(namespace.id, namespace.settings.rollup_window_us, events)
                while self._bytes > _TAIL_BYTES_MAX:
                    self._drop_oldest()
        except BaseException:
            self.rollback()
            raise
        self.written, self._expected = [], []

    def rollback_to(self, noted: int) -> None:
        """Drop what was noted after the first *noted* lists of the transaction."""
        if len(self.written) > noted:
            # Another list: a sum of this one has what is dropped.
            self.written = self.written[:noted]

    def rollback(self) -> None:
        """Drop the windows of the transaction, so that they are read from the events: a commit
        that reports an error may be on disk."""
        with self._lock:
            for namespace, events in self._expected:
                self._forget(namespace.id, max(event[1] for event in events))
        self.written, self._expected = [], []

    def add(self, namespace_id: int, size_us: int, events: Iterable[Event]) -> None:
        """Add committed events."""
        with self._lock:
            self._add(namespace_id, size_us, events)

    def _add(self, namespace_id: int, size_us: int, events: Iterable[Event]) -> None:
        windows = self._windows.setdefault(namespace_id, {})
        start_us = end_us = 0
        window = _Window()
        for name, time_us, _, _, delta, clear, _ in events:
            if not start_us <= time_us < end_us:
                start_us = window_of(time_us, size_us)
                end_us = start_us + size_us
                window = windows.setdefault(start_us, _Window())
            sums = window.sums
            if name not in sums:
                window.bytes += (added := _SUM_BYTES + len(name))
                self._bytes += added
                sums[name] = None if clear else delta
            else:
                before = sums[name]
                sums[name] = None if before is None or clear else before + delta

    def tails(
        self, namespace_id: int, size_us: int, after: Sequence[tuple[str, int]]
    ) -> list[Fold] | None:
        """Return the fold of each (counter, after_us)'s events after that instant, all as of one
        commit; None if any of them must be read from the events: then all of them must."""
        folds: list[Fold] = []
        with self._lock:
            held_us = self._held_from.get(namespace_id)
            if held_us is None:
                return None
            windows = self._windows.get(namespace_id, {})
            for counter, after_us in after:
                if after_us + 1 < held_us or (after_us + 1) % size_us:
                    return None
                total = 0
                for window_us, window in windows.items():
                    if window_us > after_us:
                        part = window.sums.get(counter, 0)
                        if part is None:
                            return None
                        total += part
                folds.append(Fold(False, total))
        return folds

    def forget(self, namespace_id: int, through_us: int) -> None:
        """Drop the windows up to *through_us*: the checkpoints include them."""
        with self._lock:
            self._forget(namespace_id, through_us)

    def _forget(self, namespace_id: int, through_us: int) -> None:
        windows = self._windows.get(namespace_id)
        if windows is None:
            return
        if namespace_id in self._held_from:
            self._held_from[namespace_id] = max(self._held_from[namespace_id], through_us + 1)
        for window_us in [start_us for start_us in windows if start_us <= through_us]:
            self._bytes -= windows.pop(window_us).bytes

    def forget_namespace(self, namespace_id: int) -> None:
        with self._lock:
            self._held_from.pop(namespace_id, None)
            for window in self._windows.pop(namespace_id, {}).values():
                self._bytes -= window.bytes

    def _drop_oldest(self) -> None:
        """Forget the oldest window of the namespace that needs the most memory."""
        sizes = {
            key: sum(window.bytes for window in windows.values())
            for key, windows in self._windows.items()
        }
        largest = max(sizes, key=lambda key: sizes[key])
        self._forget(largest, min(self._windows[largest]))
