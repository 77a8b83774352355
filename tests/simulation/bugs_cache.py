"""Bugs of the cache."""

from counter.core import read as reading
from counter.storage.memcached import commands
from counter.storage.shared.cache_lane import RequestQueue
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.shared.remote_cache import RemoteCache
from rollup.batches import BatchRoller
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit

_read_one = reading.CountReader.read_one

BUGS = (
    bug(
        "cache-trusted-when-accurate",
        "an accurate read takes whatever count the cache has",
        Edit(_read_one, "if oldest_us < now_us:\n        (entry,)", "if True:\n        (entry,)"),
        Edit(_read_one, "entry is not None and entry.time_us >= oldest_us", "entry is not None"),
    ),
    bug(
        "cached-a-window-ahead",
        "a worker puts counts into the cache as of the end of the next window",
        Edit(
            BatchRoller._update_cache,
            "self.cache.put_many(namespace, some)",
            "self.cache.put_many(namespace, [\n"
            "            (name, Checkpoint(\n"
            "                each.time_us + namespace.settings.rollup_window_us, each.count\n"
            "            ))\n"
            "            for name, each in some\n"
            "        ])",
        ),
    ),
    bug(
        "older-count-replaces-newer",
        "an older count replaces a newer one in memcached",
        Edit(
            commands._replacements, "other is None or other.time_us <= checkpoint.time_us", "True"
        ),
    ),
    bug(
        "late-answer-is-the-next",
        "a connection to the cache is used again after a time-out, and its late answer read",
        Edit(
            RequestQueue._failure,
            "    self._connection.close()\n    if isinstance",
            "    if isinstance",
        ),
    ),
    bug(
        "best-effort-sent-again",
        "a change of a BEST_EFFORT counter that was not answered is sent again",
        Edit(
            RemoteCache._change,
            "answers = await self._ask(lanes, items, [each.key for each in items])",
            "answers = await self._ask(lanes, items, [each.key for each in items])\n"
            "    if isinstance(answers[0], Unreachable):\n"
            "        answers = await lanes[0].ask(items, insist=True)",
        ),
    ),
    bug(
        "best-effort-of-any-namespace",
        "BEST_EFFORT counters of one name are one counter, whatever their namespaces",
        Edit(MemoryCache.increment_many, "(namespace.id, counter)", "(0, counter)"),
        Edit(MemoryCache.best_effort, "(namespace.id, counter)", "(0, counter)"),
    ),
)
