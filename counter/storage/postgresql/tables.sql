-- The tables of one schema. `counter schema apply` runs this with search_path set to that schema. All
-- times are microseconds since the epoch.

CREATE TABLE meta (version integer NOT NULL);

CREATE TABLE datasets (
    id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name text COLLATE "C" NOT NULL UNIQUE,
    body jsonb NOT NULL,
    -- Events earlier than this are dropped.
    dropped_before bigint NOT NULL DEFAULT 0,
    -- No append decides by an earlier clock than this.
    fence bigint NOT NULL DEFAULT 0,
    -- The latest event time of a decision: later events need no look at resolutions.
    resolved_through bigint NOT NULL DEFAULT -1
);

CREATE TABLE slices (
    dataset integer NOT NULL REFERENCES datasets,
    start bigint NOT NULL,
    until bigint NOT NULL,
    time_bucket bigint NOT NULL,
    event_buckets integer NOT NULL,
    retired_at bigint,
    PRIMARY KEY (dataset, start)
);

CREATE TABLE namespaces (
    id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    -- NULL once the namespace is deleted, until it is purged.
    name text COLLATE "C" UNIQUE,
    dataset integer NOT NULL REFERENCES datasets,
    settings jsonb NOT NULL,
    -- Accept limits, and the instants from which they hold, in order.
    era_from bigint[] NOT NULL,
    era_limit bigint[] NOT NULL,
    created_at bigint NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    -- The latest watermark of any shard.
    passed bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE watermarks (
    namespace bigint NOT NULL,
    shard integer NOT NULL,
    through bigint NOT NULL,
    PRIMARY KEY (namespace, shard)
) WITH (fillfactor = 50);

CREATE TABLE counters (
    namespace bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    checkpoint_at bigint,
    checkpoint numeric,
    settled_at bigint,
    settled numeric,
    PRIMARY KEY (namespace, name)
) WITH (fillfactor = 70);

CREATE TABLE windows (
    namespace bigint NOT NULL,
    counter text COLLATE "C" NOT NULL,
    start bigint NOT NULL,
    cleared boolean NOT NULL,
    total numeric NOT NULL,
    PRIMARY KEY (namespace, counter, start)
);

CREATE TABLE pending (
    namespace bigint NOT NULL,
    counter text COLLATE "C" NOT NULL,
    recount bigint NOT NULL,
    start bigint NOT NULL,
    PRIMARY KEY (namespace, counter, recount, start)
);

-- Marks of recounts. What adds made dirty is read from the events, which lie in time order.
CREATE TABLE marks (
    namespace bigint NOT NULL,
    shard integer NOT NULL,
    start bigint NOT NULL,
    counter text COLLATE "C" NOT NULL,
    recount bigint NOT NULL,
    PRIMARY KEY (namespace, shard, start, counter, recount)
);

CREATE TABLE resolutions (
    namespace bigint NOT NULL,
    event_time bigint NOT NULL,
    event_id bytea NOT NULL,
    scope text COLLATE "C" NOT NULL,
    -- NULL while the decision waits for the appends that it may have overlooked. A cancel that waits
    -- for them is 'cancelling', or 'cancelling_applied' in place of 'applied'.
    outcome text,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (namespace, event_time, event_id, scope)
);
CREATE INDEX resolutions_by_time ON resolutions (event_time);

CREATE TABLE reservations (
    namespace bigint NOT NULL,
    nonce bytea NOT NULL,
    time bigint NOT NULL,
    expires bigint NOT NULL,
    PRIMARY KEY (namespace, nonce)
);
CREATE INDEX reservations_by_expiry ON reservations (expires);

CREATE TABLE tokens (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    issuer bytea NOT NULL,
    next bigint NOT NULL DEFAULT 0,
    time bigint NOT NULL DEFAULT 0
);
INSERT INTO tokens (issuer) VALUES (substring(uuid_send(gen_random_uuid()) FROM 1 FOR 8));

CREATE TABLE leases (worker text COLLATE "C" PRIMARY KEY, expires bigint NOT NULL);

CREATE TABLE api_keys (
    id text COLLATE "C" PRIMARY KEY,
    document text NOT NULL,
    used bigint
);

-- One partition for each dataset, and in it one for each slice. Item key 0 with an atom is the
-- header of an atomic add: it makes a second one under the same token a conflict.
CREATE TABLE events (
    dataset integer NOT NULL,
    namespace bigint NOT NULL,
    counter text COLLATE "C" NOT NULL,
    event_time bigint NOT NULL,
    event_id bytea NOT NULL,
    item integer NOT NULL,
    delta bigint NOT NULL,
    shard integer NOT NULL,
    clear boolean NOT NULL,
    atom bytea,
    PRIMARY KEY (dataset, namespace, counter, event_time, event_id, item)
) PARTITION BY LIST (dataset);

-- Appends lie in time order, so a few bytes for each run of pages find a span.
CREATE INDEX events_by_time ON events USING brin (event_time)
    WITH (pages_per_range = 16, autosummarize = on);
CREATE INDEX events_clears ON events (namespace, counter, event_time) WHERE clear;
