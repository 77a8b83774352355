-- The table of open holds, which version 8 of the schema added.

CREATE TABLE holds (
    namespace bigint NOT NULL,
    counter text COLLATE "C" NOT NULL,
    time bigint NOT NULL,
    nonce bytea NOT NULL,
    amount bigint NOT NULL,
    expires bigint NOT NULL,
    -- Of the counter, and of its held counters, upwards and downwards.
    shards integer[] NOT NULL,
    -- What an expiry needs and no function can compute: the nonce of the end, and the atom of its
    -- event in the counter.
    end_nonce bytea NOT NULL,
    expiry_atom bytea NOT NULL,
    PRIMARY KEY (namespace, counter, time, nonce)
) WITH (fillfactor = 90);
CREATE INDEX holds_by_expiry ON holds (expires);
CREATE INDEX holds_of_counter ON holds (namespace, counter, expires, time, nonce);
