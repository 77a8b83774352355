"""Bugs of reads."""

from counter.core import read as reading
from counter.storage.cassandra import event_reads
from counter.types import Fold
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit, Swap

_Reader = reading.CountReader

BUGS = (
    bug(
        "checkpoint-before-watermark",
        "a reader reads the checkpoint before the watermark",
        Edit(
            _Reader.read_one,
            "    watermarks = await self._store.rollups.watermarks(namespace)\n"
            "    (head,) = await self._store.rollups.heads(namespace, (counter,))\n",
            "    (head,) = await self._store.rollups.heads(namespace, (counter,))\n"
            "    watermarks = await self._store.rollups.watermarks(namespace)\n",
        ),
        Edit(
            _Reader.rolled_up,
            "    watermarks = await self._store.rollups.watermarks(namespace)\n"
            "    heads = await self._store.rollups.heads(namespace, counters)\n",
            "    heads = await self._store.rollups.heads(namespace, counters)\n"
            "    watermarks = await self._store.rollups.watermarks(namespace)\n",
        ),
    ),
    bug(
        "reader-ignores-pending",
        "a reader ignores that a recount is pending",
        Edit(_Reader._rolled_up_of, "if head.pending and", "if False and"),
    ),
    bug(
        "tail-cut-at-now",
        "the live tail ends at the reader's now",
        Edit(
            _Reader.tail_end,
            "return now_us + limits.FUTURE_LIMIT_MAX_US + 2 * dataset.clock_skew_max_us + 1",
            "return now_us + 1",
        ),
    ),
    bug(
        "cache-claims-watermark",
        "a count out of the cache claims the watermark as its as_of",
        Edit(
            _Reader.read_one,
            "return Count(counter, entry.count, entry.time_us, Accuracy.EVENTUAL)",
            "watermarks = await self._store.rollups.watermarks(namespace)\n"
            "            watermark_us = watermarks[shard_of(counter, len(watermarks))]\n"
            "            time_us = max(entry.time_us, watermark_us)\n"
            "            return Count(counter, entry.count, time_us, Accuracy.EVENTUAL)",
        ),
    ),
    bug(
        "cache-holds-tails",
        "a count with its live tail goes into the cache",
        Edit(
            _Reader.read_one,
            "return Count(counter, live.count, live.time_us, Accuracy.ACCURATE)",
            "await self._cache.put_many(namespace, ((counter, live),))\n"
            "    return Count(counter, live.count, live.time_us, Accuracy.ACCURATE)",
        ),
    ),
    bug(
        "sum-wraps",
        "sums wrap at 64 bits",
        Edit(
            event_reads.EventFolds._fold,
            "Fold(False, total)",
            "Fold(False, (total + 2**63) % 2**64 - 2**63)",
        ),
    ),
    bug(
        "clear-by-arrival",
        "a clear erases whatever was in its window",
        Swap(event_reads, "fold_events", lambda _: Fold(True, 0)),
    ),
    bug(
        "clear-per-partition",
        "a clear erases only what is in its own partition",
        Edit(
            event_reads.EventFolds._fold,
            "folds[(counter, span)] = fold_events(events)",
            "from counter.windows import event_bucket_of\n"
            "            buckets = {}\n"
            "            for each in events:\n"
            "                bucket = event_bucket_of(each.event_id, slices[0].event_buckets)\n"
            "                buckets.setdefault(bucket, []).append(each)\n"
            "            some = [fold_events(each) for each in buckets.values()]\n"
            "            total = sum(each.total for each in some)\n"
            "            folds[(counter, span)] = Fold(True, total)",
        ),
    ),
    bug(
        "recount-without-settled",
        "a reader that counts for itself forgets what is settled",
        Edit(_Reader._recount, "fold_rows(settled.count, rows)", "fold_rows(0, rows)"),
    ),
)
