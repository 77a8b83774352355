"""Define every bound of the system and the relations between them, which are checked at import."""

from __future__ import annotations

from typing import Final

from counter.errors import invariant

MILLISECOND: Final = 1_000
SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

NONCE_BYTES: Final = 16
COUNTER_NAME_CHARS_MAX: Final = 256
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
NAMESPACE_NAME_CHARS_MAX: Final = 63

BODY_BYTES_MAX: Final = 1024 * 1024
#: If a body has no more fields per object and bytes per value than this, every mistake is reported;
#: otherwise only the first one.
FIELDS_EXPLAINED_MAX: Final = 32
VALUE_EXPLAINED_BYTES_MAX: Final = 4 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
#: Headers of a request, trailers included.
HEADERS_MAX: Final = 100
#: Enough for the longest names, with every byte percent-encoded, and a query.
URL_BYTES_MAX: Final = 8 * 1024
#: Connections of one process, and those of them whose TLS handshake is in progress.
CONNECTIONS_MAX: Final = 10_000
HANDSHAKES_MAX: Final = 1_000
#: Connections accepted past that bound, for one health check each.
CONNECTIONS_SPARE: Final = 100
SPARE_REQUEST_US: Final = 500 * MILLISECOND
#: How long a client may take to send its first request when most connections are in use.
FIRST_REQUEST_US: Final = 2 * SECOND
BATCH_ITEMS_MAX: Final = 1_000
ATOMIC_ITEMS_MAX: Final = 100
#: Rules of a namespace for CloudEvents; an event that all of them match is one atomic add.
EVENT_RULES_MAX: Final = 20
#: Adds of CloudEvents, each event a task, that one process does at once; others wait in turn.
KEYED_ADDS_AT_ONCE_MAX: Final = 400
#: The id, source, type and subject of a CloudEvent, and a rule's path into its data.
EVENT_ATTRIBUTE_CHARS_MAX: Final = 1_024
#: Live counts that one process streams at once, each to one watcher; how often it polls a watched
#: counter; and after how long a watcher has to reconnect.
LIVE_STREAMS_MAX: Final = 200
#: The share of one API key, and of one client address.
LIVE_STREAMS_PER_KEY_MAX: Final = 50
LIVE_STREAMS_PER_ADDRESS_MAX: Final = 100
LIVE_LOOK_US: Final = 500 * MILLISECOND
LIVE_STREAM_US: Final = 5 * MINUTE
#: Streams of adds that one process answers at once; the share of a key and of an address; the bytes
#: of one that wait for a commit; its longest line; how many lines in a row may be no adds; and how
#: long it may send none.
ADD_STREAMS_MAX: Final = 200
ADD_STREAMS_PER_KEY_MAX: Final = 50
ADD_STREAMS_PER_ADDRESS_MAX: Final = 100
ADD_STREAM_BYTES_MAX: Final = 256 * 1024
ADD_STREAM_LINE_BYTES_MAX: Final = 16 * 1024
ADD_STREAM_REFUSED_MAX: Final = 1_000
ADD_STREAM_SILENCE_US: Final = 5 * MINUTE
PAGE_ITEMS_MAX: Final = 1_000
PAGE_ITEMS_DEFAULT: Final = 100
BUSIEST_MAX: Final = 100
#: Counters that one request reads, in parts of BATCH_ITEMS_MAX: to list them by count, or as
#: metrics, because a scrape has no pages.
COUNTERS_TOGETHER_MAX: Final = 10_000
#: Names that one request searches, over all namespaces; and namespaces that an overview shows.
SEARCH_NAMES_MAX: Final = 20_000
OVERVIEW_NAMESPACES_MAX: Final = 100
#: Counters in one piece of an exposition: a client that reads slowly holds about two pieces.
METRICS_PIECE_COUNTERS: Final = 200
#: Reads of whole namespaces that a process does at once.
LONG_READS_AT_ONCE: Final = 4
HISTORY_POINTS_MAX: Final = 10_000
REQUEST_TIMEOUT_US: Final = 10 * SECOND
#: How long a process may take to finish its work after SIGTERM.
DRAIN_TIMEOUT_US: Final = 10 * SECOND
#: How long startup retries while the store is unavailable: about the restart time of a node.
START_TIMEOUT_US: Final = 30 * SECOND

#: The longest write timeout; past its timeout a write is not acknowledged.
WRITE_TIMEOUT_MAX_US: Final = MINUTE
#: How often each process reads the directory of namespaces when other processes can change it.
DIRECTORY_READ_US: Final = SECOND
#: With a copy of the directory older than this, no add is written and no window is closed.
DIRECTORY_AGE_MAX_US: Final = 5 * SECOND
#: How much an unadjusted clock may gain or lose per second: a kernel slews by at most 500 µs.
CLOCK_DRIFT_PER_S_US: Final = 500

#: The largest rate limit of a key or a namespace.
RATE_PER_S_MAX: Final = 10_000_000
REQUEST_ID_CHARS_MAX: Final = 128

#: Adds waiting for a commit, over all requests of one process. Past it: 503, before any work.
PENDING_WRITES_MAX: Final = 50_000
#: The longest expected wait for the answer to an add. Past it: 503, before any work.
WRITE_WAIT_MAX_US: Final = 500 * MILLISECOND
#: Adds that are always admitted, so that a recovery can be measured.
TRICKLE_WRITES: Final = 512
#: Late tokens being resolved at once, over all requests of one process; the adds of these and of
#: those that wait.
RESOLUTIONS_AT_ONCE_MAX: Final = 64
RESOLUTIONS_MAX: Final = 20_000
#: Bodies that are being read, over all connections of one process.
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
#: SQLite's write-ahead log grows while any reader needs older pages. Past this size writes are
#: refused. The second bound is how much of its file is kept after a reset.
WAL_BYTES_MAX: Final = 4 * 1024**3
WAL_BYTES_KEPT: Final = 64 * 1024**2
#: The timeout of a Cassandra statement, except writes of events.
STORE_TIMEOUT_US: Final = 2 * SECOND
#: Incomplete request heads, and requests pipelined behind one that is not answered yet, over all
#: connections of one process. The interpreter's overhead per part is included.
UNFINISHED_BYTES_MAX: Final = 32 * 1024 * 1024
#: Calls that wait because the maximum number of Cassandra statements is in flight.
STORE_CALLS_WAITING_MAX: Final = 10_000

#: A partition of ``counts`` holds one row per window: this keeps it to a few MiB.
WINDOWS_PER_RETENTION_MAX: Final = 100_000
#: How many slices are created ahead of the current one.
SLICES_AHEAD: Final = 2
#: Missing past slices that one maintenance step creates: with Cassandra each one is a table.
PAST_SLICES_PER_STEP: Final = 16
SHARDS_MAX: Final = 1_024
#: Namespaces per key, and shards of all namespaces: a shard costs every process some memory and its
#: worker some work, with or without events.
NAMESPACES_MAX: Final = 1_000
SHARDS_TOTAL_MAX: Final = 32_768
ROLLUP_WINDOW_MIN_US: Final = 100 * MILLISECOND
ROLLUP_WINDOW_MAX_US: Final = HOUR
ACCEPT_LIMIT_MAX_US: Final = HOUR
#: An accurate read looks for events this far ahead of its clock, whatever a namespace allows.
FUTURE_LIMIT_MAX_US: Final = 10 * MINUTE
RETENTION_MIN_US: Final = 10 * MINUTE
RETENTION_MAX_US: Final = 365 * DAY
KEY_TTL_MIN_US: Final = MINUTE
#: The shortest hold, and the part of retention that a hold may live, so that its end is known for
#: most of it.
HOLD_MIN_US: Final = SECOND
HOLD_LIVES_OF_RETENTION: Final = 10
#: With SQLite, a wall clock that moves this much more or less than the boot clock was set. If it
#: stays ahead for the hold time, the new time is accepted; until then nothing is written.
CLOCK_STEP_MAX_US: Final = SECOND
CLOCK_HOLD_US: Final = MINUTE
#: With PostgreSQL, the server's clock may step so far without notice: about the accept limit by
#: default, so that tokens of right clocks are still on time.
STORE_CLOCK_STEP_MAX_US: Final = 5 * SECOND

#: Slots that rollup workers share, independent of the number of namespaces.
LEASE_SLOTS: Final = 64
LEASE_TIME_US: Final = 10 * SECOND
LEASE_TIME_MIN_US: Final = 6 * SECOND
#: How often a worker reads which other workers are alive.
LEASE_READ_EVERY_US: Final = 500 * MILLISECOND
#: Counters that one worker reads or writes at once.
ROLLUP_CONCURRENCY: Final = 64

#: The earliest and latest instants of a token: 2000-01-01 and 2200-01-01.
TIME_MIN_US: Final = 946_684_800 * SECOND
TIME_MAX_US: Final = 7_258_118_400 * SECOND

invariant(BATCH_ITEMS_MAX <= PENDING_WRITES_MAX, "one full batch must fit the write queue")
invariant(TRICKLE_WRITES <= PENDING_WRITES_MAX, "a trickle of adds fits the write queue")
invariant(
    EVENT_RULES_MAX * BATCH_ITEMS_MAX <= RESOLUTIONS_MAX,
    "one full batch of late events that every rule matches may be resolved",
)
invariant(
    6 * 2 * COUNTER_NAME_CHARS_MAX < VALUE_EXPLAINED_BYTES_MAX,
    "a counter's name fits a value, even with each character as two escaped surrogates",
)
invariant(BODY_BYTES_MAX * 64 <= BODIES_BYTES_MAX, "many of the largest bodies fit in memory")
invariant(HEAD_BYTES_MAX * 64 <= UNFINISHED_BYTES_MAX, "many of the largest heads fit in memory")
invariant(ATOMIC_ITEMS_MAX <= BATCH_ITEMS_MAX, "an atomic add is no larger than a batch")
invariant(EVENT_RULES_MAX <= ATOMIC_ITEMS_MAX, "what an event adds is an atomic add")
invariant(2 * EVENT_RULES_MAX <= KEYED_ADDS_AT_ONCE_MAX, "several events are counted at once")
invariant(
    KEYED_ADDS_AT_ONCE_MAX < TRICKLE_WRITES, "events alone do not cause the rejection of other adds"
)
invariant(
    EVENT_RULES_MAX * BATCH_ITEMS_MAX <= PENDING_WRITES_MAX,
    "one full batch of events that every rule matches must fit the write queue",
)
invariant(4 * WAL_BYTES_KEPT <= WAL_BYTES_MAX, "what is kept of a log is well below its limit")
invariant(URL_BYTES_MAX < HEAD_BYTES_MAX, "a URL is a part of a head")
invariant(
    3 * 4 * COUNTER_NAME_CHARS_MAX + NAMESPACE_NAME_CHARS_MAX < URL_BYTES_MAX // 2,
    "every counter can be named in a URL, with half of it left",
)
invariant(
    2 * LIVE_STREAMS_PER_KEY_MAX <= 2 * LIVE_STREAMS_PER_ADDRESS_MAX <= LIVE_STREAMS_MAX,
    "neither one key nor one address has more than half of the live streams",
)
invariant(
    2 * ADD_STREAMS_PER_KEY_MAX <= 2 * ADD_STREAMS_PER_ADDRESS_MAX <= ADD_STREAMS_MAX,
    "neither one key nor one address has more than half of the streams of adds",
)
invariant(
    4 * ADD_STREAM_LINE_BYTES_MAX <= ADD_STREAM_BYTES_MAX, "a stream holds several of its lines"
)
invariant(
    2 * ADD_STREAMS_MAX * ADD_STREAM_BYTES_MAX <= BODIES_BYTES_MAX,
    "all streams hold less than bodies may",
)
invariant(
    2 * VALUE_EXPLAINED_BYTES_MAX <= ADD_STREAM_LINE_BYTES_MAX,
    "a line fits a counter's name and more",
)
invariant(PAGE_ITEMS_DEFAULT <= PAGE_ITEMS_MAX, "the default page is no larger than the largest")
invariant(PAGE_ITEMS_MAX <= BATCH_ITEMS_MAX, "the counts of a page are read as one batch is")
invariant(PAGE_ITEMS_MAX <= COUNTERS_TOGETHER_MAX, "a full page may be ordered by count")
invariant(
    2 * DIRECTORY_READ_US <= DIRECTORY_AGE_MAX_US,
    "a copy of the directory outlives a reading that fails",
)
invariant(
    2 * (DIRECTORY_AGE_MAX_US + WRITE_TIMEOUT_MAX_US) <= RETENTION_MIN_US,
    "the name of a deleted namespace is free long before its events are dropped",
)
invariant(16 * SHARDS_MAX <= SHARDS_TOTAL_MAX, "some of the largest namespaces fit the budget")
invariant(
    LEASE_READ_EVERY_US * 5 <= LEASE_TIME_MIN_US, "a worker looks often within a lease's time"
)
invariant(
    2 * (LEASE_READ_EVERY_US + STORE_TIMEOUT_US) <= LEASE_TIME_MIN_US - 2 * LEASE_READ_EVERY_US,
    "a lease lasts for two tries to renew it, each as long as a statement may take",
)
invariant(LEASE_TIME_MIN_US <= LEASE_TIME_US, "the default lease time is one that works")
invariant(
    CLOCK_STEP_MAX_US <= STORE_CLOCK_STEP_MAX_US < CLOCK_HOLD_US,
    "a step of the clock is held longer than it is wide",
)
invariant(
    STORE_CLOCK_STEP_MAX_US < KEY_TTL_MIN_US, "no key is forgotten because of a step unnoticed"
)
invariant(ROLLUP_WINDOW_MIN_US < ROLLUP_WINDOW_MAX_US, "the window bounds are in order")
invariant(TIME_MAX_US < INT64_MAX, "an instant fits a signed 64-bit integer")


#: Recommended size bound of a partition: Cassandra reads and repairs a partition as a whole.
PARTITION_BYTES_MAX: Final = 4 * 1024 * 1024
#: For how many slices the recorded partition sizes of a slice are kept.
SIZES_KEPT_SLICES: Final = 12
