-- The functions of one schema. `counter schema apply` runs this with search_path set to that schema,
-- after it dropped those of an older version.

CREATE FUNCTION clock_us() RETURNS bigint LANGUAGE sql VOLATILE
RETURN (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- Make this transaction's commit wait like a write, including for a synchronous standby. A transaction
-- that only found an event must not be acknowledged earlier: an append whose wait for the standby was
-- cancelled is committed, and visible, on the primary alone.
CREATE FUNCTION wait_as_a_write() RETURNS void LANGUAGE sql VOLATILE
RETURN pg_logical_emit_message(true, 'counter', '');

-- The payload of an event, which is the same for an add that was accepted and one that was refused.
-- counter/bounds.py has the formats of atoms.
CREATE FUNCTION payload_of(p_delta bigint, p_clear boolean, p_atom bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN p_clear THEN '\x'::bytea
    WHEN p_atom IS NULL THEN '\x00'::bytea || int8send(p_delta)
        || '\x00000000000000000000000000000000'::bytea
    WHEN length(p_atom) IN (25, 68) THEN substring(p_atom FOR 25)
    ELSE substring(p_atom FOR 16)
END;

CREATE FUNCTION is_refusal(p_atom bytea) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN coalesce(length(p_atom) IN (68, 84), false);

-- The bound in the atom of a request: 1 is at_least, 2 is at_most; NULL if it has none.
CREATE FUNCTION bound_in(p_atom bytea, p_which integer) RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN length(p_atom) IN (25, 41) AND get_byte(p_atom, length(p_atom) - 25) & p_which > 0
    THEN ('x' || encode(substring(p_atom FROM length(p_atom) - 23 + 8 * p_which FOR 8), 'hex'))
        ::bit(64)::bigint
END;

-- A count in 16 bytes.
CREATE FUNCTION count_send(p_count numeric) RETURNS bytea LANGUAGE sql IMMUTABLE
RETURN int8send(div(p_count - mod(mod(p_count, 18446744073709551616) + 18446744073709551616,
        18446744073709551616), 18446744073709551616)::bigint)
    || int8send((mod(mod(p_count + 9223372036854775808, 18446744073709551616)
        + 18446744073709551616, 18446744073709551616) - 9223372036854775808)::bigint);

-- Why an add was refused, in bytes, with the count and what was held.
CREATE FUNCTION refusal_of(
    p_which integer, p_item integer, p_bound bigint, p_count numeric, p_held numeric DEFAULT 0
) RETURNS bytea LANGUAGE sql IMMUTABLE
RETURN substring(int4send(p_which) FROM 4) || substring(int4send(p_item) FROM 3) || int8send(p_bound)
    || count_send(p_count) || count_send(p_held);

-- Why an add of p_delta to p_count is refused, by its own bounds or by those of its namespace; NULL if
-- it is accepted: refusal() in counter/bounds.py. p_held is what is held by those that go the same way.
CREATE FUNCTION refusal(
    p_count numeric, p_delta numeric, own_least bigint, own_most bigint,
    p_least bigint, p_most bigint, p_item integer, p_held numeric DEFAULT 0
) RETURNS bytea LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN p_delta > 0 AND p_count + p_held + p_delta > least(own_most, p_most)
    THEN refusal_of(CASE WHEN own_most <= p_most OR p_most IS NULL THEN 1 ELSE 3 END, p_item,
        least(own_most, p_most), p_count, p_held)
    WHEN p_delta < 0 AND p_count + p_held + p_delta < greatest(own_least, p_least)
    THEN refusal_of(CASE WHEN own_least >= p_least OR p_least IS NULL THEN 0 ELSE 2 END, p_item,
        greatest(own_least, p_least), p_count, p_held)
END;

-- The atom of an add that is refused.
CREATE FUNCTION refused_atom(p_delta bigint, p_atom bytea, p_why bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE
RETURN coalesce(p_atom, '\x'::bytea) || CASE WHEN length(p_atom) IN (25, 41) THEN '\x'::bytea
    ELSE payload_of(p_delta, false, NULL) END || p_why;

-- Which events may not be written: too old, in a window that was rolled up, or of a token that is
-- decided, as applied too: a cancel may replace that. NULL if all may be. Takes the lock that a fence
-- waits for, and holds it until the transaction ends.
--
-- The lock comes before the clock: who waits for the lock's holders then knows that every append
-- that comes later reads a later clock. A procedural function keeps the order of its statements,
-- and each has a snapshot of its own. Raises CN001 if the namespace is deleted, and CN004 if it has
-- bounds and the caller does not keep them.
CREATE FUNCTION late(
    p_dataset integer, p_namespace bigint,
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], keeps_bounds boolean
) RETURNS boolean[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    d datasets%ROWTYPE;
    n namespaces%ROWTYPE;
    now_us bigint;
    earliest bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'appends need read committed, not %',
            current_setting('transaction_isolation') USING ERRCODE = 'CN002';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(('datasets'::regclass::oid::bigint << 32) | p_dataset);
    SELECT * INTO d FROM datasets WHERE id = p_dataset;
    SELECT * INTO n FROM namespaces WHERE id = p_namespace AND name IS NOT NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'namespace % is deleted', p_namespace USING ERRCODE = 'CN001';
    END IF;
    IF n.settings ? 'bounds' AND NOT keeps_bounds THEN
        RAISE EXCEPTION 'namespace % has bounds', p_namespace USING ERRCODE = 'CN004';
    END IF;
    now_us := greatest(clock_us(), d.fence);
    earliest := (SELECT min(t) FROM unnest(p_time) t);
    IF earliest > n.passed AND earliest >= now_us - (SELECT min(l) FROM unnest(n.era_limit) l) THEN
        IF earliest > d.resolved_through THEN
            RETURN NULL;
        END IF;
        -- A cancelled token of the future keeps resolved_through ahead. One search is for all events;
        -- min() has it use an index, whatever the statistics say.
        IF (SELECT min(r.event_time) FROM resolutions r WHERE r.namespace = p_namespace
            AND r.event_time BETWEEN earliest AND (SELECT max(t) FROM unnest(p_time) t)) IS NULL
        THEN
            RETURN NULL;
        END IF;
    END IF;
    RETURN (
        SELECT array_agg(
            e.time <= n.passed
            OR e.time < now_us - coalesce((
                SELECT era.accept_limit
                FROM unnest(n.era_from, n.era_limit) era (since, accept_limit)
                WHERE era.since <= e.time ORDER BY era.since DESC LIMIT 1), n.era_limit[1])
            OR EXISTS (
                SELECT FROM resolutions r
                WHERE r.namespace = p_namespace AND r.event_time = e.time AND r.event_id = e.id
                AND r.scope = CASE e.item WHEN 0 THEN e.counter ELSE '' END)
            ORDER BY e.place)
        FROM unnest(p_counter, p_time, p_id, p_item)
            WITH ORDINALITY e (counter, time, id, item, place));
END $$;

-- What became of events that were inserted in this transaction unless they were there: as append()
-- has it. Planned for each call, so that it opens no partition but those of the events.
CREATE FUNCTION outcomes(
    p_dataset integer, p_namespace bigint, p_counter text[], p_time bigint[], p_id bytea[],
    p_item integer[], p_delta bigint[], p_clear boolean[], p_atom bytea[], is_late boolean[]
) RETURNS smallint[] LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    first bigint := (SELECT min(t) FROM unnest(p_time) t);
    last bigint := (SELECT max(t) FROM unnest(p_time) t);
BEGIN
    PERFORM wait_as_a_write();
    RETURN (
        SELECT array_agg(CASE
            WHEN is_late[e.place] THEN 3
            -- Only what could not be decided was not inserted.
            WHEN s.event_id IS NULL THEN 5
            WHEN s.is_ours AND e.time_of_identity = 1
                THEN CASE WHEN is_refusal(s.atom) THEN 4 ELSE 0 END
            WHEN payload_of(s.delta, s.clear, s.atom) = payload_of(e.delta, e.clear, e.atom)
                THEN CASE WHEN is_refusal(s.atom) THEN 4 ELSE 1 END
            ELSE 2
            END::smallint ORDER BY e.place)
        FROM (
            SELECT *, row_number() OVER (PARTITION BY counter, time, id, item ORDER BY place)
                AS time_of_identity
            FROM unnest(p_counter, p_time, p_id, p_item, p_delta, p_clear, p_atom)
                WITH ORDINALITY w (counter, time, id, item, delta, clear, atom, place)
        ) e
        LEFT JOIN LATERAL (
            SELECT s.*, s.xmin = pg_current_xact_id()::xid AS is_ours FROM events s
            WHERE s.dataset = p_dataset AND s.namespace = p_namespace AND s.counter = e.counter
            AND s.event_time = e.time AND s.event_id = e.id AND s.item = e.item
            AND s.event_time BETWEEN first AND last
        ) s ON true);
END $$;

-- Notes the names of counters. Those that are there are left out, because ON CONFLICT would wait for
-- a rollup that changes their rows. OFFSET has each name searched for, whatever the statistics say.
CREATE FUNCTION note_counters(p_namespace bigint, p_names text[]) RETURNS void
    LANGUAGE sql VOLATILE AS $$
    INSERT INTO counters (namespace, name)
        SELECT DISTINCT p_namespace, n.name COLLATE "C" FROM unnest(p_names) n (name)
        WHERE NOT EXISTS (
            SELECT FROM counters c WHERE c.namespace = p_namespace AND c.name = n.name
            OFFSET 0)
        ORDER BY 2 ON CONFLICT DO NOTHING;
$$;

-- Lists deleted counters again that are in p_new and have an event later than the delete, which is a
-- row of pending with a recount of -1. It waits for no rollup that does the same.
CREATE FUNCTION list_again(
    p_namespace bigint, p_new text[], p_counter text[], p_time bigint[], is_late boolean[]
) RETURNS void LANGUAGE sql VOLATILE AS $$
    DELETE FROM pending WHERE ctid = ANY (ARRAY(
        SELECT p.ctid FROM unnest(p_new) n (name)
        CROSS JOIN LATERAL (
            SELECT ctid, start FROM pending WHERE namespace = p_namespace AND counter = n.name
            AND recount = -1 FOR UPDATE SKIP LOCKED) p
        WHERE EXISTS (
            SELECT FROM unnest(p_counter, p_time) WITH ORDINALITY e (counter, time, place)
            WHERE e.counter = n.name AND e.time > p.start
            AND (is_late IS NULL OR NOT is_late[e.place]))));
$$;

-- Waits until no other transaction decides about bounds of these counters, and has the next ones wait
-- until this one ends. There are 64 locks for a namespace, so that no statement fills the server's
-- table of locks; all take them in one order. They come before the lock of appends: a queue for a hot
-- counter keeps no fence waiting.
CREATE FUNCTION lock_counts(p_namespace bigint, p_counter text[]) RETURNS void
    LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(key) FROM unnest(ARRAY(
        SELECT DISTINCT ('counters'::regclass::oid::bigint << 32)
            | ((p_namespace * 64 + (hashtext(name) & 63)) & 4294967295)
        FROM unnest(p_counter) name ORDER BY 1)) key;
END $$;

-- The last clear among a counter's events of a span, and the sum of what follows it.
CREATE FUNCTION fold(
    p_dataset integer, p_namespace bigint, p_counter text, p_first bigint, p_last bigint,
    OUT clear_at bigint, OUT total numeric
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    clear_at := (SELECT max(e.event_time) FROM events e WHERE e.dataset = p_dataset
        AND e.namespace = p_namespace AND e.counter = p_counter AND e.clear
        AND e.event_time BETWEEN p_first AND p_last);
    total := (SELECT coalesce(sum(e.delta), 0) FROM events e WHERE e.dataset = p_dataset
        AND e.namespace = p_namespace AND e.counter = p_counter
        AND e.event_time BETWEEN coalesce(clear_at + 1, p_first) AND p_last);
END $$;

-- A counter's count up to p_as_of, with its pending recounts done: Head.recounts and fold_rows().
CREATE FUNCTION recounted(
    p_dataset integer, p_namespace bigint, p_counter text, p_settled_at bigint, p_settled numeric,
    p_as_of bigint
) RETURNS numeric LANGUAGE plpgsql STABLE AS $$
DECLARE
    size bigint := (SELECT settings ->> 'rollup_window_us' FROM namespaces WHERE id = p_namespace);
BEGIN
    RETURN (
        WITH summed AS (
            SELECT r.start, f.clear_at IS NOT NULL AS cleared, f.total FROM (
                SELECT DISTINCT p.recount AS start FROM pending p
                WHERE p.namespace = p_namespace AND p.counter = p_counter
                AND p.recount > p_settled_at AND p.recount <= p_as_of AND p.recount
                >= (SELECT d.dropped_before FROM datasets d WHERE d.id = p_dataset)
            ) r CROSS JOIN fold(p_dataset, p_namespace, p_counter, r.start, r.start + size - 1) f
        ), merged AS (
            SELECT * FROM summed
            UNION ALL SELECT w.start, w.cleared, w.total FROM windows w
            WHERE w.namespace = p_namespace AND w.counter = p_counter AND w.start > p_settled_at
            AND w.start <= p_as_of AND w.start NOT IN (SELECT s.start FROM summed s)
        )
        SELECT CASE WHEN bool_or(m.cleared) THEN 0 ELSE p_settled END
            + coalesce(sum(m.total) FILTER (WHERE m.start >= m.clear_at), 0)
        FROM (
            SELECT *, coalesce(max(start) FILTER (WHERE cleared) OVER (), 0) AS clear_at FROM merged
        ) m);
END $$;

-- The counts of counters, as an accurate read has them; adds up to `erased` change nothing. It sees
-- what the statement that calls it does.
CREATE FUNCTION counts_of(
    p_dataset integer, p_namespace bigint, p_counter text[], p_shard integer[]
) RETURNS TABLE (name text, count numeric, erased bigint) LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- Partitions of earlier events are not opened.
    since bigint := (SELECT min(through) FROM watermarks WHERE namespace = p_namespace);
    has_pending boolean := EXISTS (SELECT FROM pending WHERE namespace = p_namespace);
BEGIN
    RETURN QUERY SELECT k.name,
        CASE WHEN t.clear_at IS NULL THEN coalesce(t.total, 0)
            + CASE WHEN a.is_pending THEN recounted(p_dataset, p_namespace, k.name,
                coalesce(c.settled_at, 0), coalesce(c.settled, 0), a.after)
            ELSE coalesce(c.checkpoint, 0) END
        ELSE (fold(p_dataset, p_namespace, k.name, t.clear_at + 1, 9223372036854775807)).total
        END,
        coalesce(t.clear_at, -1)
    FROM (SELECT DISTINCT u.name, u.shard FROM unnest(p_counter, p_shard) u (name, shard)) k
    JOIN watermarks m ON m.namespace = p_namespace AND m.shard = k.shard
    LEFT JOIN LATERAL (
        SELECT * FROM counters c WHERE c.namespace = p_namespace AND c.name = k.name LIMIT 1
    ) c ON true
    CROSS JOIN LATERAL (
        -- Rows of windows are guaranteed to exist only up to the watermark.
        SELECT p.is_pending, greatest(m.through,
            CASE WHEN p.is_pending THEN c.settled_at ELSE c.checkpoint_at END) AS after
        FROM (
            SELECT has_pending AND EXISTS (
                SELECT FROM pending p WHERE p.namespace = p_namespace AND p.counter = k.name
                AND p.recount > coalesce(c.settled_at, 0)
                AND p.recount <= greatest(m.through, c.checkpoint_at)) AS is_pending OFFSET 0
        ) p
    ) a
    CROSS JOIN LATERAL (
        SELECT max(e.event_time) FILTER (WHERE e.clear) AS clear_at, sum(e.delta) AS total
        FROM events e WHERE e.dataset = p_dataset AND e.namespace = p_namespace
        AND e.counter = k.name AND e.event_time > a.after AND e.event_time > since
    ) t;
END $$;

-- The atoms of those events that are refused because of a bound, by their places; NULL if none is. An
-- atom is empty if make_room() cannot decide the event. The counts are read after the locks. Most
-- counters have room for all their adds of the call. Of the others, each add is decided after those
-- before it; what is stored already, or comes twice, is not decided again.
--
-- A plan for each call would take longer than the rest. One for all calls locks the tables of all
-- slices, though it opens only those of the tail: many of them could fill the server's table of locks.
-- Nested loops over a call's arrays, whose lengths no plan knows, would take the square of its events.
CREATE FUNCTION refusals(
    p_dataset integer, p_namespace bigint, p_counter text[], p_time bigint[], p_id bytea[],
    p_item integer[], p_delta bigint[], p_shard integer[], p_clear boolean[], p_atom bytea[],
    is_late boolean[]
) RETURNS bytea[] LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET jit = off AS $$
DECLARE
    bounds jsonb := (SELECT settings -> 'bounds' FROM namespaces WHERE id = p_namespace);
    lower bigint := bounds ->> 'at_least';
    upper bigint := bounds ->> 'at_most';
    -- The counters that may be short of room.
    short text[];
    counts numeric[];
    erasures bigint[];
    -- What their open holds reserve.
    ups numeric[];
    downs numeric[];
    refused bytea[];
    is_counted boolean[] := array_fill(false, ARRAY[cardinality(p_time)]);
    counter text;
    count numeric;
    erased bigint;
    up numeric;
    down numeric;
    held numeric;
    ends_left integer := 100;
    why bytea;
    e record;
BEGIN
    IF (SELECT count(*) > 64 FROM slices WHERE dataset = p_dataset) THEN
        SET LOCAL plan_cache_mode = force_custom_plan;
    END IF;
    SELECT array_agg(c.name), array_agg(c.count), array_agg(c.erased),
        array_agg(coalesce(h.up, 0)), array_agg(coalesce(h.down, 0))
        INTO short, counts, erasures, ups, downs
        FROM (
            SELECT u.counter, bool_or(u.clear) AS has_clear,
                sum(u.delta) FILTER (WHERE u.delta > 0) AS rise,
                sum(u.delta) FILTER (WHERE u.delta < 0) AS fall,
                least(upper, min(bound_in(u.atom, 2)) FILTER (WHERE u.delta > 0)) AS most,
                greatest(lower, max(bound_in(u.atom, 1)) FILTER (WHERE u.delta < 0)) AS least
            FROM unnest(p_counter, p_delta, p_clear, p_atom) u (counter, delta, clear, atom)
            GROUP BY 1
        ) k
        JOIN counts_of(p_dataset, p_namespace, p_counter, p_shard) c ON c.name = k.counter
        LEFT JOIN held_of(p_dataset, p_namespace, p_counter) h ON h.name = k.counter
        WHERE k.has_clear OR c.count + k.rise + coalesce(h.up, 0) > k.most
            OR c.count + k.fall + coalesce(h.down, 0) < k.least;
    IF short IS NULL THEN
        RETURN NULL;
    END IF;
    FOR e IN
        SELECT w.counter, w.time, w.place, p_delta[w.place] AS delta, p_clear[w.place] AS clear,
            w.id, w.item, p_atom[w.place] AS atom, bound_in(p_atom[w.place], 1) AS own_least,
            bound_in(p_atom[w.place], 2) AS own_most, c.count, c.erased, c.up, c.down,
            CASE WHEN p_clear[w.place] THEN
                (fold(p_dataset, p_namespace, w.counter, w.time + 1, 9223372036854775807)).total
            END AS later,
            EXISTS (
                SELECT FROM events s WHERE s.dataset = p_dataset AND s.namespace = p_namespace
                AND s.counter = w.counter AND s.event_time = w.time AND s.event_id = w.id
                AND s.item = w.item
                OFFSET 0) AS is_stored
        FROM unnest(short, counts, erasures, ups, downs) c (name, count, erased, up, down)
        JOIN (
            SELECT u.counter, u.time, u.id, u.item, min(u.place) AS place
            FROM unnest(p_counter, p_time, p_id, p_item)
                WITH ORDINALITY u (counter, time, id, item, place)
            WHERE is_late IS NULL OR NOT is_late[u.place] GROUP BY 1, 2, 3, 4
        ) w ON w.counter = c.name
        ORDER BY w.counter COLLATE "C", w.place
    LOOP
        IF counter IS DISTINCT FROM e.counter THEN
            counter := e.counter;
            count := e.count;
            erased := e.erased;
            up := e.up;
            down := e.down;
        END IF;
        IF e.is_stored OR e.time <= erased THEN
            CONTINUE;
        ELSIF e.clear THEN
            erased := e.time;
            count := e.later + (SELECT coalesce(sum(w.delta), 0)
                FROM unnest(p_counter, p_time, p_delta, is_counted) w (counter, time, delta, is_counted)
                WHERE w.counter = e.counter AND w.time > e.time AND w.is_counted);
            CONTINUE;
        END IF;
        held := CASE WHEN e.delta > 0 THEN up ELSE down END;
        why := refusal(count, e.delta, e.own_least, e.own_most, lower, upper, 0, held);
        IF why IS NOT NULL AND held <> 0 THEN
            SELECT * INTO held, ends_left, why FROM make_room(p_dataset, p_namespace, counter, count,
                e.delta, e.own_least, e.own_most, lower, upper, 0, held, ends_left);
            up := CASE WHEN e.delta > 0 THEN held ELSE up END;
            down := CASE WHEN e.delta > 0 THEN down ELSE held END;
        END IF;
        IF why IS NULL THEN
            count := count + e.delta;
            is_counted[e.place] := true;
        ELSIF why = '\x' THEN
            -- Not written, however often it comes.
            FOR place IN 1..cardinality(p_time) LOOP
                IF (p_counter[place], p_time[place], p_id[place], p_item[place])
                    = (e.counter, e.time, e.id, e.item)
                THEN
                    refused[place] := why;
                END IF;
            END LOOP;
        ELSE
            refused[e.place] := refused_atom(e.delta, e.atom, why);
        END IF;
    END LOOP;
    RETURN refused;
END $$;

-- Why an atomic add is refused because of a bound: the sum of its items to a counter counts. NULL if
-- it is accepted, and empty if make_room() cannot decide it. p_first is the place of the first item.
CREATE FUNCTION refusal_of_atomic(
    p_dataset integer, p_namespace bigint, p_counter text[], p_time bigint[], p_item integer[],
    p_delta bigint[], p_shard integer[], p_atom bytea[], p_first integer DEFAULT 0
) RETURNS bytea LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    bounds jsonb := (SELECT settings -> 'bounds' FROM namespaces WHERE id = p_namespace);
    lower bigint := bounds ->> 'at_least';
    upper bigint := bounds ->> 'at_most';
    ends_left integer := 100;
    held numeric;
    why bytea;
    i record;
BEGIN
    IF (SELECT count(*) > 64 FROM slices WHERE dataset = p_dataset) THEN
        SET LOCAL plan_cache_mode = force_custom_plan;
    END IF;
    FOR i IN
        SELECT s.*, c.count, coalesce(CASE WHEN s.delta > 0 THEN h.up ELSE h.down END, 0) AS held
        FROM (
            SELECT w.counter, sum(w.delta) AS delta, max(bound_in(w.atom, 1)) AS own_least,
                min(bound_in(w.atom, 2)) AS own_most, min(w.place)::integer AS first
            FROM (
                SELECT *, p_first - 1 + row_number() OVER (ORDER BY u.counter COLLATE "C", u.item)
                    AS place
                FROM unnest(p_counter, p_item, p_delta, p_atom) u (counter, item, delta, atom)
            ) w GROUP BY w.counter
        ) s
        JOIN counts_of(p_dataset, p_namespace, p_counter, p_shard) c ON c.name = s.counter
        LEFT JOIN held_of(p_dataset, p_namespace, p_counter) h ON h.name = s.counter
        WHERE p_time[1] > c.erased ORDER BY s.first
    LOOP
        held := i.held;
        why := refusal(i.count, i.delta, i.own_least, i.own_most, lower, upper, i.first, held);
        IF why IS NOT NULL AND held <> 0 THEN
            SELECT * INTO held, ends_left, why FROM make_room(p_dataset, p_namespace, i.counter,
                i.count, i.delta, i.own_least, i.own_most, lower, upper, i.first, held, ends_left);
        END IF;
        EXIT WHEN why IS NOT NULL;
    END LOOP;
    RETURN why;
END $$;

-- Writes each event on its own. The outcomes in order: 0 new, 1 replayed, 2 conflict, 3 late, 4 refused
-- because of a bound, 5 not written because make_room() cannot decide it; NULL if all are new, and no new counter stays deleted, which the next append may
-- have to list again. Only with keeps_bounds are bounds looked at. Raises CN001 and CN004 as late()
-- does, and 23514 if no slice holds an event: then nothing is written.
CREATE FUNCTION append(
    p_dataset integer, p_namespace bigint, p_new_counters text[],
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], p_delta bigint[],
    p_shard integer[], p_clear boolean[], p_atom bytea[], keeps_bounds boolean DEFAULT false
) RETURNS smallint[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    is_late boolean[];
    refused bytea[];
    inserted integer;
BEGIN
    IF keeps_bounds THEN
        PERFORM lock_counts(p_namespace, p_counter);
    END IF;
    is_late := late(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, keeps_bounds);
    IF keeps_bounds THEN
        refused := refusals(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, p_delta, p_shard,
            p_clear, p_atom, is_late);
    END IF;
    IF cardinality(p_new_counters) > 0 THEN
        PERFORM note_counters(p_namespace, ARRAY(
            SELECT c.name FROM unnest(p_new_counters) c (name)
            WHERE is_late IS NULL OR EXISTS (
                SELECT FROM unnest(p_counter, is_late) e (counter, is_late)
                WHERE e.counter = c.name AND NOT e.is_late)));
        PERFORM list_again(p_namespace, p_new_counters, p_counter, p_time, is_late);
    END IF;
    -- In the order of identities: two appends of the same events cannot wait for each other.
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        SELECT p_dataset, p_namespace, e.counter, e.time, e.id, e.item,
            CASE WHEN refused[e.place] IS NULL THEN e.delta ELSE 0 END, e.shard, e.clear,
            coalesce(refused[e.place], e.atom)
        FROM unnest(p_counter, p_time, p_id, p_item, p_delta, p_shard, p_clear, p_atom)
            WITH ORDINALITY e (counter, time, id, item, delta, shard, clear, atom, place)
        WHERE (is_late IS NULL OR NOT is_late[e.place]) AND refused[e.place] IS DISTINCT FROM '\x'
        ORDER BY e.counter COLLATE "C", e.time, e.id, e.item, e.place
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(p_time) AND refused IS NULL AND NOT EXISTS (
        SELECT FROM unnest(p_new_counters) n (name) JOIN pending p
        ON p.namespace = p_namespace AND p.counter = n.name AND p.recount = -1)
    THEN
        RETURN NULL;
    END IF;
    RETURN outcomes(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, p_delta, p_clear, p_atom,
        is_late);
END $$;

-- Whether a token is that of an atomic add.
CREATE FUNCTION has_header(p_dataset integer, p_namespace bigint, p_time bigint, p_id bytea)
    RETURNS boolean LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM events e WHERE e.dataset = p_dataset AND e.namespace = p_namespace
        AND e.counter = '' AND e.event_time = p_time AND e.event_id = p_id AND e.item = 0);
END $$;

-- Inserts the events of one token, with a header that has p_header; false if there is a header.
-- Raises CN003 if an event of another payload is there.
CREATE FUNCTION insert_atomic(
    p_dataset integer, p_namespace bigint,
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], p_delta bigint[],
    p_shard integer[], p_header bytea, p_atom bytea[]
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    inserted integer;
BEGIN
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        VALUES (p_dataset, p_namespace, '', p_time[1], p_id[1], 0, 0, -1, false, p_header)
        ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM note_counters(p_namespace, p_counter);
    PERFORM list_again(p_namespace, p_counter, p_counter, p_time, NULL);
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        SELECT p_dataset, p_namespace, e.counter, e.time, e.id, e.item, e.delta, e.shard, false, e.atom
        FROM unnest(p_counter, p_time, p_id, p_item, p_delta, p_shard, p_atom)
            e (counter, time, id, item, delta, shard, atom)
        ORDER BY e.counter COLLATE "C", e.item
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted < cardinality(p_time) THEN
        RAISE EXCEPTION 'an event of another payload is there' USING ERRCODE = 'CN003';
    END IF;
    RETURN true;
END $$;

-- Writes the events of one token or none; one outcome as append() has it. CN003 is a conflict, too.
-- p_atom is the fingerprint. Only with p_atoms, those of the items, are bounds looked at: they refuse
-- all items, and the header has the refusal, too.
CREATE FUNCTION append_atomic(
    p_dataset integer, p_namespace bigint,
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], p_delta bigint[],
    p_shard integer[], p_atom bytea, p_atoms bytea[] DEFAULT NULL
) RETURNS smallint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    is_late boolean[];
    why bytea;
    deltas bigint[] := p_delta;
    atoms bytea[] := p_atoms;
BEGIN
    IF p_atoms IS NOT NULL THEN
        PERFORM lock_counts(p_namespace, p_counter);
    END IF;
    is_late := late(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, p_atoms IS NOT NULL);
    IF is_late[1] THEN
        RETURN 3;
    END IF;
    IF p_atoms IS NULL THEN
        atoms := array_fill(p_atom, ARRAY[cardinality(p_time)]);
    ELSIF NOT has_header(p_dataset, p_namespace, p_time[1], p_id[1]) THEN
        why := refusal_of_atomic(p_dataset, p_namespace, p_counter, p_time, p_item, p_delta, p_shard,
            p_atoms);
        IF why = '\x' THEN
            RETURN 5;
        ELSIF why IS NOT NULL THEN
            deltas := array_fill(0::bigint, ARRAY[cardinality(p_time)]);
            atoms := ARRAY(
                SELECT refused_atom(e.delta, e.atom, why) FROM unnest(p_delta, p_atoms)
                    WITH ORDINALITY e (delta, atom, place) ORDER BY e.place);
        END IF;
    END IF;
    IF NOT insert_atomic(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, deltas, p_shard,
        CASE WHEN why IS NULL THEN p_atom ELSE refused_atom(0, p_atom, why) END, atoms)
    THEN
        RETURN (outcomes(p_dataset, p_namespace, ARRAY[''], p_time[1:1], p_id[1:1], ARRAY[0],
            ARRAY[0::bigint], ARRAY[false], ARRAY[p_atom], NULL))[1];
    END IF;
    RETURN CASE WHEN why IS NULL THEN 0 ELSE 4 END;
END $$;

-- Called by `counter schema apply` alone.
CREATE FUNCTION make_dataset(p_name text, p_body jsonb) RETURNS boolean
    LANGUAGE plpgsql AS $$
DECLARE
    made integer;
BEGIN
    IF EXISTS (SELECT FROM datasets WHERE name = p_name) THEN
        RETURN false;
    END IF;
    INSERT INTO datasets (name, body) VALUES (p_name, p_body) ON CONFLICT DO NOTHING
        RETURNING id INTO made;
    IF made IS NOT NULL THEN
        EXECUTE format('CREATE TABLE events_%s PARTITION OF events FOR VALUES IN (%s)'
            ' PARTITION BY RANGE (event_time)', made, made);
    END IF;
    RETURN made IS NOT NULL;
END $$;

-- The functions that are SECURITY DEFINER run with the owner's rights: the service's role makes and
-- drops no table otherwise, and deletes no event.

CREATE FUNCTION make_slice(
    p_dataset integer, p_start bigint, p_until bigint, p_time_bucket bigint, p_event_buckets integer
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO slices SELECT p_dataset, p_start, p_until, p_time_bucket, p_event_buckets, NULL
        FROM datasets WHERE id = p_dataset AND dropped_before < p_until
        ON CONFLICT DO NOTHING;
    IF FOUND THEN
        -- Attached when it is there: that lets appends to other slices go on.
        EXECUTE format('CREATE TABLE events_%s_%s (LIKE events_%s)', p_dataset, p_start, p_dataset);
        EXECUTE format('ALTER TABLE events_%s ATTACH PARTITION events_%s_%s FOR VALUES FROM (%s)'
            ' TO (%s)', p_dataset, p_dataset, p_start, p_start, p_until);
    END IF;
END $$;

-- Removes events of a token, and requests a recount of them in a window that no worker can have summed.
-- The caller has the lock of appends, and the owner's rights.
CREATE FUNCTION remove_token(
    p_dataset integer, p_namespace bigint, p_time bigint, p_id bytea,
    p_counter text[], p_item integer[], p_window bigint
) RETURNS void LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    open_us bigint := greatest(clock_us(), p_time, (SELECT fence FROM datasets WHERE id = p_dataset),
        (SELECT passed + 1 FROM namespaces WHERE id = p_namespace));
BEGIN
    WITH removed AS (
        DELETE FROM events e USING unnest(p_counter, p_item) k (counter, item)
        WHERE e.dataset = p_dataset AND e.namespace = p_namespace AND e.counter = k.counter
        AND e.event_time = p_time AND e.event_id = p_id AND e.item = k.item
        RETURNING e.counter, e.shard
    ), recounted AS (
        -- The header of an atomic add has no shard.
        SELECT DISTINCT counter, shard, open_us - open_us % p_window AS start,
            p_time - p_time % p_window AS recount
        FROM removed WHERE shard >= 0
    ), marked AS (
        INSERT INTO marks SELECT p_namespace, shard, start, counter, recount FROM recounted
        ORDER BY counter ON CONFLICT DO NOTHING
    )
    INSERT INTO pending SELECT p_namespace, counter, recount, start FROM recounted
        ORDER BY counter ON CONFLICT DO NOTHING;
END $$;

-- Settles an open decision about a token, whose appends of before it have ended, and returns it.
--
-- p_delta, p_clear and p_atom are the payload with p_fingerprint: those of the token's event with item
-- 0, a single add or the header of an atomic one. p_counter and p_item are all its events. An open
-- cancel removes them, under the lock of appends, which a worker waits for. Raises CN001 as late() does.
CREATE FUNCTION settle(
    p_dataset integer, p_namespace bigint, p_time bigint, p_id bytea, p_scope text,
    p_fingerprint bytea, p_delta bigint, p_clear boolean, p_atom bytea,
    p_counter text[], p_item integer[], p_window bigint
) RETURNS resolutions LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    r resolutions%ROWTYPE;
    is_same boolean;
    is_refused boolean;
BEGIN
    PERFORM wait_as_a_write();
    SELECT * INTO r FROM resolutions WHERE namespace = p_namespace AND event_time = p_time
        AND event_id = p_id AND scope = p_scope FOR UPDATE;
    IF NOT FOUND OR r.outcome NOT LIKE 'cancelling%' THEN
        RETURN r;
    END IF;
    IF r.outcome IS NOT NULL THEN
        PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}', true);
    END IF;
    SELECT payload_of(e.delta, e.clear, e.atom) = payload_of(p_delta, p_clear, p_atom),
        is_refusal(e.atom) INTO is_same, is_refused
        FROM events e WHERE e.dataset = p_dataset AND e.namespace = p_namespace
        AND e.counter = p_scope AND e.event_time = p_time AND e.event_id = p_id AND e.item = 0;
    IF is_same IS NULL THEN
        r.fingerprint := CASE WHEN r.outcome IS NULL THEN p_fingerprint ELSE r.fingerprint END;
        r.outcome := CASE WHEN r.outcome IS NULL THEN 'void'
            WHEN r.outcome = 'cancelling_applied' THEN 'cancelled' ELSE 'cancelled_void' END;
    ELSIF is_same AND r.outcome IS NOT NULL AND r.fingerprint = p_fingerprint THEN
        PERFORM remove_token(p_dataset, p_namespace, p_time, p_id, p_counter, p_item, p_window);
        -- A refusal counted nothing, although a late token of it is decided as applied.
        r.outcome := CASE WHEN is_refused THEN 'cancelled_void' ELSE 'cancelled' END;
    ELSIF NOT is_same AND r.outcome IS NOT NULL AND r.fingerprint <> p_fingerprint THEN
        -- The event may be the one that is cancelled: only those with its payload can tell. It is not
        -- the caller's, so what the caller gets is true.
        r.outcome := 'applied';
        r.fingerprint := '';
        RETURN r;
    ELSE
        r.outcome := 'applied';
        r.fingerprint := CASE WHEN is_same THEN p_fingerprint ELSE '' END;
    END IF;
    UPDATE resolutions SET outcome = r.outcome, fingerprint = r.fingerprint
        WHERE namespace = p_namespace AND event_time = p_time AND event_id = p_id
        AND scope = p_scope;
    RETURN r;
END $$;

-- Whether no token of a slice that ended at p_until can be asked for any more.
CREATE FUNCTION is_past_retention(p_dataset integer, p_until bigint) RETURNS boolean
    LANGUAGE sql STABLE AS $$
    SELECT p_until + (body ->> 'retention_us')::bigint <= clock_us()
        FROM datasets WHERE id = p_dataset;
$$;

-- Returns false if the slice is not past retention, if it has an open hold, which has expired and must
-- be ended first, or if statements that read the events do not end soon: appends queue behind the lock
-- that it waits for, and a backup may read for hours.
CREATE FUNCTION drop_slice(p_dataset integer, p_start bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '50ms' AS $$
DECLARE
    ended bigint;
BEGIN
    SELECT until INTO ended FROM slices WHERE dataset = p_dataset AND start = p_start;
    IF NOT is_past_retention(p_dataset, ended) OR EXISTS (
        SELECT FROM holds h JOIN namespaces n ON n.id = h.namespace
        WHERE h.time < ended AND n.dataset = p_dataset AND n.name IS NOT NULL)
    THEN
        RETURN false;
    END IF;
    DELETE FROM slices WHERE dataset = p_dataset AND start = p_start;
    IF FOUND THEN
        UPDATE datasets SET dropped_before = greatest(dropped_before, ended) WHERE id = p_dataset;
        EXECUTE format('DROP TABLE events_%s_%s', p_dataset, p_start);
    END IF;
    RETURN true;
EXCEPTION
    WHEN lock_not_available THEN
        RETURN false;
END $$;

-- Writes one batch of a rollup. A head, or a row, that is older than what is there changes nothing
-- of it; rows up to the settled instant are dropped.
CREATE FUNCTION apply(
    p_namespace bigint, p_through bigint,
    p_counter text[], p_at bigint[], p_count numeric[], p_settled_at bigint[], p_settled numeric[],
    r_counter text[], r_start bigint[], r_cleared boolean[], r_total numeric[], r_at bigint[],
    d_counter text[], d_recount bigint[], d_start bigint[]
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- This locks the counters in order, those too that are not changed.
    INSERT INTO counters AS c (namespace, name, checkpoint_at, checkpoint, settled_at, settled)
        SELECT p_namespace, u.* FROM unnest(p_counter, p_at, p_count, p_settled_at, p_settled)
            u (name, at, count, settled_at, settled) ORDER BY u.name COLLATE "C"
        ON CONFLICT (namespace, name) DO UPDATE SET
            checkpoint_at = greatest(c.checkpoint_at, excluded.checkpoint_at),
            checkpoint = CASE WHEN excluded.checkpoint_at >= coalesce(c.checkpoint_at, 0)
                THEN excluded.checkpoint ELSE c.checkpoint END,
            settled_at = greatest(c.settled_at, excluded.settled_at),
            settled = CASE WHEN excluded.settled_at >= coalesce(c.settled_at, 0)
                THEN excluded.settled ELSE c.settled END;
    INSERT INTO windows AS w (namespace, counter, start, cleared, total)
        SELECT p_namespace, r.counter, r.start, r.cleared, r.total
        FROM unnest(r_counter, r_start, r_cleared, r_total, r_at)
            r (counter, start, cleared, total, at)
        JOIN counters c ON c.namespace = p_namespace AND c.name = r.counter
        WHERE c.checkpoint_at <= r.at AND r.start > coalesce(c.settled_at, 0)
        ON CONFLICT (namespace, counter, start)
            DO UPDATE SET cleared = excluded.cleared, total = excluded.total;
    IF num_nonnulls(VARIADIC p_settled_at) > 0 THEN
        DELETE FROM windows w USING counters c
            WHERE c.namespace = p_namespace AND c.name = ANY (p_counter)
            AND w.namespace = p_namespace AND w.counter = c.name AND w.start <= c.settled_at;
    END IF;
    DELETE FROM pending p USING unnest(d_counter, d_recount, d_start) d (counter, recount, start)
        WHERE p.namespace = p_namespace AND p.counter = d.counter AND p.recount = d.recount
        AND p.start = d.start;
END $$;

-- Deletes a bounded amount of what cannot be asked for any more; whether there is more.
CREATE FUNCTION purge(p_now bigint, p_horizon bigint, p_rows integer) RETURNS boolean
    LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    gone bigint;
    deleted integer;
    more boolean;
BEGIN
    DELETE FROM reservations WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM reservations WHERE expires <= p_now LIMIT p_rows));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    more := deleted = p_rows;
    DELETE FROM resolutions WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM resolutions WHERE event_time < p_horizon LIMIT p_rows));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    more := more OR deleted = p_rows;
    DELETE FROM leases WHERE expires <= clock_us();
    -- Events of a deleted namespace are dropped with their slices: its id is never used again.
    SELECT id INTO gone FROM namespaces WHERE name IS NULL LIMIT 1;
    IF gone IS NULL THEN
        RETURN more;
    END IF;
    DELETE FROM windows WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM windows WHERE namespace = gone LIMIT p_rows));
    IF FOUND THEN
        RETURN true;
    END IF;
    DELETE FROM counters WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM counters WHERE namespace = gone LIMIT p_rows));
    IF FOUND THEN
        RETURN true;
    END IF;
    DELETE FROM pending WHERE namespace = gone;
    DELETE FROM holds WHERE namespace = gone;
    DELETE FROM marks WHERE namespace = gone;
    DELETE FROM watermarks WHERE namespace = gone;
    DELETE FROM resolutions WHERE namespace = gone;
    DELETE FROM reservations WHERE namespace = gone;
    DELETE FROM namespaces WHERE id = gone;
    RETURN true;
END $$;
