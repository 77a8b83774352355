-- The functions of holds; docs/architecture.md has their protocol. `counter schema apply` runs this
-- after functions.sql.
--
-- All that begins, ends or changes a hold has first the lock of its counter, then that of appends.

-- The counter of what is held by amounts that go the way of p_amount: held_name() in counter/holds.py.
CREATE FUNCTION held_name(p_counter text, p_amount numeric) RETURNS text LANGUAGE sql IMMUTABLE
RETURN chr(1) || CASE WHEN p_amount < 0 THEN '-' ELSE '+' END || p_counter;

-- The clock that decides about holds, which never steps back. The caller has the lock of appends.
CREATE FUNCTION hold_clock_us(p_dataset integer) RETURNS bigint LANGUAGE sql VOLATILE
RETURN greatest(clock_us(), (SELECT fence FROM datasets WHERE id = p_dataset));

-- What open holds reserve, upwards and downwards, of those counters that may have some. It sees what
-- the statement that calls it does.
CREATE FUNCTION held_of(p_dataset integer, p_namespace bigint, p_counter text[])
    RETURNS TABLE (name text, up numeric, down numeric) LANGUAGE plpgsql STABLE AS $$
DECLARE
    names text[];
    shards integer[];
BEGIN
    IF NOT EXISTS (SELECT FROM holds WHERE namespace = p_namespace) THEN
        RETURN;
    END IF;
    SELECT array_agg(held_name(k.counter, w.way)), array_agg(h.shards[w.place]) INTO names, shards
        FROM (SELECT DISTINCT u.counter FROM unnest(p_counter) u (counter)) k
        CROSS JOIN LATERAL (
            SELECT o.shards FROM holds o WHERE o.namespace = p_namespace AND o.counter = k.counter
            LIMIT 1
        ) h
        CROSS JOIN (VALUES (1, 2), (-1, 3)) w (way, place);
    IF names IS NOT NULL THEN
        RETURN QUERY SELECT substring(c.name FROM 3),
            sum(c.count) FILTER (WHERE substring(c.name FROM 2 FOR 1) = '+'),
            sum(c.count) FILTER (WHERE substring(c.name FROM 2 FOR 1) = '-')
            FROM counts_of(p_dataset, p_namespace, names, shards) c GROUP BY 1;
    END IF;
END $$;

-- Ends an open hold, and returns the time of its end: in a window that no worker has passed, and not
-- before the hold. p_atom is that of the event in its counter.
CREATE FUNCTION write_end(h holds, p_dataset integer, p_amount bigint, p_atom bytea) RETURNS bigint
    LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text[] := ARRAY[h.counter, held_name(h.counter, h.amount)];
    fingerprint bytea := substring(p_atom FOR 16);
    ended bigint := (
        SELECT greatest(hold_clock_us(p_dataset), h.time, n.passed + 1)
        FROM namespaces n WHERE n.id = h.namespace);
BEGIN
    PERFORM note_counters(h.namespace, names);
    PERFORM list_again(h.namespace, names, names, ARRAY[ended, ended], NULL);
    -- No atomic add has an item of this number, so no client can have taken the place.
    INSERT INTO events
        (dataset, namespace, counter, event_time, event_id, item, delta, shard, clear, atom)
        VALUES
        (p_dataset, h.namespace, names[2], ended, h.end_nonce, 2147483647, -h.amount,
            h.shards[CASE WHEN h.amount < 0 THEN 3 ELSE 2 END], false, fingerprint),
        (p_dataset, h.namespace, names[1], ended, h.end_nonce, 2147483647, p_amount, h.shards[1],
            false, p_atom);
    DELETE FROM holds o WHERE o.namespace = h.namespace AND o.counter = h.counter
        AND o.time = h.time AND o.nonce = h.nonce;
    -- It must not be found open while its events are kept.
    INSERT INTO reservations (namespace, nonce, time, expires)
        SELECT h.namespace, h.end_nonce, ended, s.until + 2 * (d.body ->> 'retention_us')::bigint
        FROM datasets d JOIN slices s ON s.dataset = d.id AND s.start <= h.time AND s.until > h.time
        WHERE d.id = p_dataset;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the slice of an open hold is gone';
    END IF;
    RETURN ended;
END $$;

-- Why an add or a hold is refused; NULL if it is accepted. While there is no room, it ends expired holds
-- that go the same way, earliest first, at most ends_left: what is held then is in `held`. Nothing is
-- known if more would have to end: `why` is empty then.
CREATE FUNCTION make_room(
    p_dataset integer, p_namespace bigint, p_counter text, p_count numeric, p_delta numeric,
    own_least bigint, own_most bigint, p_least bigint, p_most bigint, p_item integer,
    INOUT held numeric, INOUT ends_left integer, OUT why bytea
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    h holds%ROWTYPE;
    now_us bigint := hold_clock_us(p_dataset);
BEGIN
    why := refusal(p_count, p_delta, own_least, own_most, p_least, p_most, p_item, held);
    FOR h IN
        SELECT * FROM holds o WHERE o.namespace = p_namespace AND o.counter = p_counter
        AND o.expires <= now_us AND (o.amount > 0) = (p_delta > 0)
        ORDER BY o.expires, o.time, o.nonce LIMIT ends_left + 1
    LOOP
        EXIT WHEN why IS NULL;
        IF ends_left = 0 THEN
            why := '\x';
            RETURN;
        END IF;
        PERFORM write_end(h, p_dataset, 0, h.expiry_atom);
        ends_left := ends_left - 1;
        held := held - h.amount;
        why := refusal(p_count, p_delta, own_least, own_most, p_least, p_most, p_item, held);
    END LOOP;
END $$;

-- Begins a hold of p_amount, which expires after p_lasts; one outcome as append() has it. p_atoms are
-- those of its events, in the counter and in its held counter; p_shards and the rest are as the table
-- of holds has them. Raises CN001 as late() does.
CREATE FUNCTION begin_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea,
    p_amount bigint, p_lasts bigint, p_shards integer[], p_atoms bytea[], p_end bytea, p_expiry bytea
) RETURNS smallint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    held text := held_name(p_counter, p_amount);
    fingerprint bytea := substring(p_atoms[1] FOR 16);
    is_late boolean[];
    why bytea;
BEGIN
    PERFORM lock_counts(p_namespace, ARRAY[p_counter]);
    is_late := late(
        p_dataset, p_namespace, ARRAY[p_counter], ARRAY[p_time], ARRAY[p_id], ARRAY[1], true);
    IF is_late[1] THEN
        RETURN 3;
    END IF;
    IF NOT has_header(p_dataset, p_namespace, p_time, p_id) THEN
        -- No clear erases what it reserves, so it is compared whatever its time is. The held counter
        -- comes first in the order of its events.
        why := refusal_of_atomic(p_dataset, p_namespace, ARRAY[p_counter],
            ARRAY[9223372036854775807], ARRAY[1], ARRAY[p_amount], p_shards[1:1], p_atoms[1:1], 1);
        IF why = '\x' THEN
            RETURN 5;
        END IF;
    END IF;
    IF NOT insert_atomic(
        p_dataset, p_namespace, ARRAY[p_counter, held], ARRAY[p_time, p_time], ARRAY[p_id, p_id],
        ARRAY[1, 1], ARRAY[0, CASE WHEN why IS NULL THEN p_amount ELSE 0 END],
        ARRAY[p_shards[1], p_shards[CASE WHEN p_amount < 0 THEN 3 ELSE 2 END]],
        CASE WHEN why IS NULL THEN fingerprint ELSE refused_atom(0, fingerprint, why) END,
        CASE WHEN why IS NULL THEN p_atoms
            ELSE ARRAY[refused_atom(0, p_atoms[1], why), refused_atom(0, p_atoms[2], why)] END)
    THEN
        RETURN (outcomes(p_dataset, p_namespace, ARRAY[''], ARRAY[p_time], ARRAY[p_id], ARRAY[0],
            ARRAY[0::bigint], ARRAY[false], ARRAY[fingerprint], NULL))[1];
    END IF;
    IF why IS NOT NULL THEN
        RETURN 4;
    END IF;
    INSERT INTO holds
        (namespace, counter, time, nonce, amount, expires, shards, end_nonce, expiry_atom)
        VALUES (p_namespace, p_counter, p_time, p_id, p_amount,
            hold_clock_us(p_dataset) + p_lasts, p_shards, p_end, p_expiry);
    RETURN 0;
END $$;

-- A hold as of one moment: the event in its counter, how long it is open, and the event of its end.
-- p_end is the nonce of the end.
CREATE FUNCTION find_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea, p_end bytea,
    OUT has_slice boolean, OUT delta bigint, OUT atom bytea, OUT expires bigint,
    OUT ended bigint, OUT end_delta bigint, OUT end_atom bytea
) LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    has_slice := EXISTS (SELECT FROM slices s WHERE s.dataset = p_dataset AND s.start <= p_time
        AND s.until > p_time);
    SELECT e.delta, e.atom INTO delta, atom FROM events e WHERE e.dataset = p_dataset
        AND e.namespace = p_namespace AND e.counter = p_counter AND e.event_time = p_time
        AND e.event_id = p_id AND e.item = 1;
    expires := (SELECT h.expires FROM holds h WHERE h.namespace = p_namespace
        AND h.counter = p_counter AND h.time = p_time AND h.nonce = p_id);
    ended := (
        SELECT r.time FROM reservations r WHERE r.namespace = p_namespace AND r.nonce = p_end);
    IF ended IS NOT NULL THEN
        SELECT e.delta, e.atom INTO end_delta, end_atom FROM events e WHERE e.dataset = p_dataset
            AND e.namespace = p_namespace AND e.counter = p_counter AND e.event_time = ended
            AND e.event_id = p_end AND e.item = 2147483647;
    END IF;
END $$;

-- Takes the locks for a change of a hold, and returns its row; none if it is not open. The commit waits
-- for the standby, because what is found then is answered. Raises CN001 as late() does.
CREATE FUNCTION locked_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea
) RETURNS holds LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    h holds%ROWTYPE;
BEGIN
    PERFORM wait_as_a_write();
    PERFORM lock_counts(p_namespace, ARRAY[p_counter]);
    PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}', true);
    SELECT * INTO h FROM holds o WHERE o.namespace = p_namespace AND o.counter = p_counter
        AND o.time = p_time AND o.nonce = p_id;
    RETURN h;
END $$;

-- Ends a hold that is open: it has expired, if that is so, and otherwise it ends with p_amount and
-- p_atom, unless these are NULL. Returns the time of the end, and whether it has expired; `expires` is
-- set if it was open.
CREATE FUNCTION end_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea,
    p_amount bigint, p_atom bytea, OUT expires bigint, OUT ended bigint, OUT has_expired boolean
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    h holds%ROWTYPE := locked_hold(p_dataset, p_namespace, p_counter, p_time, p_id);
BEGIN
    expires := h.expires;
    has_expired := hold_clock_us(p_dataset) >= h.expires;
    IF has_expired THEN
        ended := write_end(h, p_dataset, 0, h.expiry_atom);
    ELSIF p_atom IS NOT NULL AND expires IS NOT NULL THEN
        ended := write_end(h, p_dataset, p_amount, p_atom);
    END IF;
END $$;

-- Ends holds of a counter that have expired, those that expired first, at most p_most; returns how many.
CREATE FUNCTION expire_holds(
    p_dataset integer, p_namespace bigint, p_counter text, p_most integer
) RETURNS integer LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    h holds%ROWTYPE;
    ended integer := 0;
    now_us bigint;
BEGIN
    PERFORM lock_counts(p_namespace, ARRAY[p_counter]);
    PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}', true);
    now_us := hold_clock_us(p_dataset);
    FOR h IN
        SELECT * FROM holds o WHERE o.namespace = p_namespace AND o.counter = p_counter
        AND o.expires <= now_us ORDER BY o.expires, o.time, o.nonce LIMIT p_most
    LOOP
        PERFORM write_end(h, p_dataset, 0, h.expiry_atom);
        ended := ended + 1;
    END LOOP;
    RETURN ended;
END $$;

-- Lets an open hold expire p_lasts from now, or at p_latest if that is earlier, and never earlier than
-- it would. One that has expired is ended. Returns what end_hold() does.
CREATE FUNCTION extend_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea,
    p_lasts bigint, p_latest bigint, OUT expires bigint, OUT ended bigint, OUT has_expired boolean
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT * INTO expires, ended, has_expired
        FROM end_hold(p_dataset, p_namespace, p_counter, p_time, p_id, NULL, NULL);
    IF NOT has_expired THEN
        expires := greatest(expires, least(hold_clock_us(p_dataset) + p_lasts, p_latest));
        UPDATE holds h SET expires = extend_hold.expires WHERE h.namespace = p_namespace
            AND h.counter = p_counter AND h.time = p_time AND h.nonce = p_id;
    END IF;
END $$;

-- Cancels the token of a hold, and returns the decision about it. One that is open is released with
-- p_release; of one that was settled, or has expired, the token stays applied. One that was refused is
-- removed. One that is not found never will be: a hold that is under way waits for the counter's lock,
-- and then looks for this decision.
CREATE FUNCTION cancel_hold(
    p_dataset integer, p_namespace bigint, p_counter text, p_time bigint, p_id bytea, p_held text,
    p_fingerprint bytea, p_release bytea, p_end bytea, p_window bigint,
    OUT outcome text, OUT fingerprint bytea
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    h holds%ROWTYPE := locked_hold(p_dataset, p_namespace, p_counter, p_time, p_id);
    r resolutions%ROWTYPE;
    is_same boolean;
    is_refused boolean;
    was_counted boolean;
BEGIN
    SELECT payload_of(e.delta, e.clear, e.atom) = p_fingerprint, is_refusal(e.atom)
        INTO is_same, is_refused FROM events e WHERE e.dataset = p_dataset
        AND e.namespace = p_namespace AND e.counter = '' AND e.event_time = p_time
        AND e.event_id = p_id AND e.item = 0;
    outcome := 'applied';
    fingerprint := '';
    IF NOT is_same THEN
        RETURN;
    END IF;
    fingerprint := p_fingerprint;
    was_counted := is_same IS NOT NULL AND NOT is_refused;
    SELECT * INTO r FROM resolutions o WHERE o.namespace = p_namespace AND o.event_time = p_time
        AND o.event_id = p_id AND o.scope = '';
    -- An open decision is of no payload yet. A refusal that was resolved is decided as applied.
    IF r.outcome IS NOT NULL AND is_refused IS NOT TRUE THEN
        IF r.outcome LIKE 'cancelled%' OR r.fingerprint NOT IN (p_fingerprint, '') THEN
            outcome := CASE WHEN r.outcome LIKE 'cancelling%' THEN 'applied' ELSE r.outcome END;
            fingerprint := r.fingerprint;
            RETURN;
        END IF;
        was_counted := r.outcome = 'applied';
    END IF;
    IF is_refused THEN
        PERFORM remove_token(p_dataset, p_namespace, p_time, p_id, ARRAY['', p_counter, p_held],
            ARRAY[0, 1, 1], p_window);
    ELSIF h.expires <= hold_clock_us(p_dataset) THEN
        PERFORM write_end(h, p_dataset, 0, h.expiry_atom);
        RETURN;
    ELSIF h.expires IS NOT NULL THEN
        PERFORM write_end(h, p_dataset, 0, p_release);
    ELSIF is_same AND payload_of(0, false, p_release) IS DISTINCT FROM (
        SELECT payload_of(0, false, f.end_atom)
        FROM find_hold(p_dataset, p_namespace, p_counter, p_time, p_id, p_end) f)
    THEN
        RETURN;
    END IF;
    outcome := CASE WHEN was_counted THEN 'cancelled' ELSE 'cancelled_void' END;
    INSERT INTO resolutions AS o (namespace, event_time, event_id, scope, outcome, fingerprint)
        VALUES (p_namespace, p_time, p_id, '', cancel_hold.outcome, p_fingerprint)
        ON CONFLICT (namespace, event_time, event_id, scope) DO UPDATE
        SET outcome = excluded.outcome, fingerprint = excluded.fingerprint;
    UPDATE datasets SET resolved_through = p_time
        WHERE id = p_dataset AND resolved_through < p_time;
END $$;
