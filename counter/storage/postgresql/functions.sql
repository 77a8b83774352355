-- The functions of one schema. `counter schema apply` runs this with search_path set to that schema,
-- after it dropped those of an older version.

CREATE FUNCTION clock_us() RETURNS bigint LANGUAGE sql VOLATILE
RETURN (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- Make this transaction's commit wait like a write, including for a synchronous standby. A transaction
-- that only found an event must not be acknowledged earlier: an append whose wait for the standby was
-- cancelled is committed, and visible, on the primary alone.
CREATE FUNCTION wait_as_a_write() RETURNS void LANGUAGE sql VOLATILE
RETURN pg_logical_emit_message(true, 'counter', '');

-- Which events may not be written: too old, in a window that was rolled up, or of a token that is
-- decided, as applied too: a cancel may replace that. NULL if all may be. Takes the lock that a fence
-- waits for, and holds it until the transaction ends.
--
-- The lock comes before the clock: who waits for the lock's holders then knows that every append
-- that comes later reads a later clock. A procedural function keeps the order of its statements,
-- and each has a snapshot of its own. Raises CN001 if the namespace is deleted.
CREATE FUNCTION late(
    p_dataset integer, p_namespace bigint,
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[]
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
            WHEN s.is_ours AND e.time_of_identity = 1 THEN 0
            WHEN s.clear = e.clear AND (e.clear OR s.delta = e.delta)
                AND s.atom IS NOT DISTINCT FROM e.atom THEN 1
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

-- Writes each event on its own. The outcomes in order: 0 new, 1 replayed, 2 conflict, 3 late; NULL
-- if all are new, and no new counter stays deleted, which the next append may have to list again.
-- Raises CN001 as late() does, and 23514 if no slice holds an event: then nothing is written.
CREATE FUNCTION append(
    p_dataset integer, p_namespace bigint, p_new_counters text[],
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], p_delta bigint[],
    p_shard integer[], p_clear boolean[], p_atom bytea[]
) RETURNS smallint[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    is_late boolean[] := late(p_dataset, p_namespace, p_counter, p_time, p_id, p_item);
    inserted integer;
BEGIN
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
        SELECT p_dataset, p_namespace, e.counter, e.time, e.id, e.item, e.delta, e.shard, e.clear,
            e.atom
        FROM unnest(p_counter, p_time, p_id, p_item, p_delta, p_shard, p_clear, p_atom)
            WITH ORDINALITY e (counter, time, id, item, delta, shard, clear, atom, place)
        WHERE is_late IS NULL OR NOT is_late[e.place]
        ORDER BY e.counter COLLATE "C", e.time, e.id, e.item, e.place
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(p_time) AND NOT EXISTS (
        SELECT FROM unnest(p_new_counters) n (name) JOIN pending p
        ON p.namespace = p_namespace AND p.counter = n.name AND p.recount = -1)
    THEN
        RETURN NULL;
    END IF;
    RETURN outcomes(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, p_delta, p_clear, p_atom,
        is_late);
END $$;

-- Writes the events of one token or none; one outcome as append() has it. CN003 is a conflict, too.
CREATE FUNCTION append_atomic(
    p_dataset integer, p_namespace bigint,
    p_counter text[], p_time bigint[], p_id bytea[], p_item integer[], p_delta bigint[],
    p_shard integer[], p_atom bytea
) RETURNS smallint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    is_late boolean[] := late(p_dataset, p_namespace, p_counter, p_time, p_id, p_item);
    inserted integer;
BEGIN
    IF is_late[1] THEN
        RETURN 3;
    END IF;
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        VALUES (p_dataset, p_namespace, '', p_time[1], p_id[1], 0, 0, -1, false, p_atom)
        ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN (outcomes(p_dataset, p_namespace, ARRAY[''], p_time[1:1], p_id[1:1], ARRAY[0],
            ARRAY[0::bigint], ARRAY[false], ARRAY[p_atom], NULL))[1];
    END IF;
    PERFORM note_counters(p_namespace, p_counter);
    PERFORM list_again(p_namespace, p_counter, p_counter, p_time, NULL);
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        SELECT p_dataset, p_namespace, e.counter, e.time, e.id, e.item, e.delta, e.shard, false,
            p_atom
        FROM unnest(p_counter, p_time, p_id, p_item, p_delta, p_shard)
            e (counter, time, id, item, delta, shard)
        ORDER BY e.counter COLLATE "C", e.item
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted < cardinality(p_time) THEN
        RAISE EXCEPTION 'an event of another payload is there' USING ERRCODE = 'CN003';
    END IF;
    RETURN 0;
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

-- Settles an open decision about a token, whose appends of before it have ended, and returns it.
--
-- p_delta, p_clear and p_atom are the payload with p_fingerprint: those of the token's event with item
-- 0, a single add or the header of an atomic one. p_counter and p_item are all its events. An open
-- cancel removes them, and requests a recount in a window that no worker can have summed: its clock is
-- read under the lock of appends, which a worker waits for. Raises CN001 as late() does.
CREATE FUNCTION settle(
    p_dataset integer, p_namespace bigint, p_time bigint, p_id bytea, p_scope text,
    p_fingerprint bytea, p_delta bigint, p_clear boolean, p_atom bytea,
    p_counter text[], p_item integer[], p_window bigint
) RETURNS resolutions LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    r resolutions%ROWTYPE;
    is_same boolean;
    open_us bigint;
BEGIN
    PERFORM wait_as_a_write();
    SELECT * INTO r FROM resolutions WHERE namespace = p_namespace AND event_time = p_time
        AND event_id = p_id AND scope = p_scope FOR UPDATE;
    IF NOT FOUND OR r.outcome NOT LIKE 'cancelling%' THEN
        RETURN r;
    END IF;
    IF r.outcome IS NOT NULL THEN
        PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}');
    END IF;
    SELECT e.clear = p_clear AND (e.clear OR e.delta = p_delta)
        AND e.atom IS NOT DISTINCT FROM p_atom INTO is_same
        FROM events e WHERE e.dataset = p_dataset AND e.namespace = p_namespace
        AND e.counter = p_scope AND e.event_time = p_time AND e.event_id = p_id AND e.item = 0;
    IF is_same IS NULL THEN
        r.fingerprint := CASE WHEN r.outcome IS NULL THEN p_fingerprint ELSE r.fingerprint END;
        r.outcome := CASE WHEN r.outcome IS NULL THEN 'void'
            WHEN r.outcome = 'cancelling_applied' THEN 'cancelled' ELSE 'cancelled_void' END;
    ELSIF is_same AND r.outcome IS NOT NULL AND r.fingerprint = p_fingerprint THEN
        open_us := greatest(clock_us(), p_time, (SELECT fence FROM datasets WHERE id = p_dataset),
            (SELECT passed + 1 FROM namespaces WHERE id = p_namespace));
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
        r.outcome := 'cancelled';
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

-- Returns false if the slice is not past retention, or if statements that read the events do not end
-- soon: appends queue behind the lock that it waits for, and a backup may read for hours.
CREATE FUNCTION drop_slice(p_dataset integer, p_start bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '50ms' AS $$
DECLARE
    ended bigint;
BEGIN
    SELECT until INTO ended FROM slices WHERE dataset = p_dataset AND start = p_start;
    IF NOT is_past_retention(p_dataset, ended) THEN
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
    DELETE FROM marks WHERE namespace = gone;
    DELETE FROM watermarks WHERE namespace = gone;
    DELETE FROM resolutions WHERE namespace = gone;
    DELETE FROM reservations WHERE namespace = gone;
    DELETE FROM namespaces WHERE id = gone;
    RETURN true;
END $$;
