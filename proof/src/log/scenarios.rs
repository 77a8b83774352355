//! The scenarios: each is small, and has what some rules need.

use super::state::Time;

pub struct Scenario {
    pub name: &'static str,
    /// Whether it is small enough for `--quick`.
    pub quick: bool,
    /// The time of each token.
    pub tokens: &'static [Time],
    /// One token is an atomic add of two items, to two counters.
    pub atomic: bool,
    /// This token is not an add, but a clear.
    pub clear: Option<usize>,
    /// Of each request that may be under way at once, its token.
    pub requests: &'static [usize],
    /// How many requests to cancel the first token may be under way at once.
    pub cancels: usize,
    /// An earlier request for the first token has sent its event, and was given up.
    pub given_up: bool,
    /// An earlier request for the first token was acknowledged.
    pub acknowledged: bool,
    pub workers: usize,
    /// With two, each counter has its own, and each shard a worker.
    pub shards: usize,
    pub reader: bool,
    /// How far each clock may be off the store's.
    pub skew: Time,
    pub accept_limit: Time,
    pub retention: Option<Time>,
    /// The end of the slice that is dropped; None: it has all tokens.
    pub slice_end: Option<Time>,
    /// A client asks for a recount of the first token's window.
    pub recount: bool,
    /// When the scenario begins.
    pub begins: Time,
    /// Time ends here; then everything stops, and a worker finishes.
    pub horizon: Time,
}

pub const ONE: Scenario = Scenario {
    name: "one token",
    quick: true,
    tokens: &[1],
    atomic: false,
    clear: None,
    requests: &[0, 0],
    cancels: 0,
    given_up: false,
    acknowledged: false,
    workers: 1,
    shards: 1,
    reader: false,
    skew: 0,
    accept_limit: 1,
    retention: None,
    slice_end: None,
    recount: false,
    begins: 1,
    horizon: 7,
};

/// One that takes too long for `--quick`.
const LONG: Scenario = Scenario { quick: false, ..ONE };

/// The first token was counted in a slice that is dropped while the second one is late.
const TWO_SLICES: Scenario = Scenario {
    name: "two slices",
    tokens: &[1, 8],
    acknowledged: true,
    requests: &[1],
    recount: true,
    accept_limit: 0,
    retention: Some(6),
    slice_end: Some(2),
    begins: 7,
    horizon: 11,
    ..ONE
};

/// The items of an atomic add that was given up land late, and only workers decide about it.
const ATOMIC_WORKERS: Scenario = Scenario {
    name: "atomic, two workers",
    atomic: true,
    given_up: true,
    requests: &[],
    workers: 2,
    accept_limit: 0,
    horizon: 4,
    ..ONE
};

/// A cancel, and the retry of an add that was given up.
const CANCEL: Scenario = Scenario {
    name: "cancel",
    given_up: true,
    requests: &[0],
    cancels: 1,
    accept_limit: 0,
    horizon: 4,
    ..ONE
};

/// Only workers decide about the atomic add that is cancelled.
const CANCEL_BY_WORKERS: Scenario = Scenario {
    name: "cancel, atomic, longer",
    quick: false,
    atomic: true,
    requests: &[],
    horizon: 5,
    ..CANCEL
};

pub const SCENARIOS: &[Scenario] = &[
    ONE,
    Scenario { name: "skewed clocks", skew: 1, horizon: 6, ..ONE },
    Scenario { name: "two workers", requests: &[0], workers: 2, horizon: 8, ..ONE },
    Scenario { name: "two tokens", tokens: &[1, 2], requests: &[0, 1], ..ONE },
    Scenario { name: "clear", tokens: &[1, 2], clear: Some(1), requests: &[0, 1], horizon: 6, ..ONE },
    Scenario { name: "clear at once", tokens: &[1, 1], clear: Some(1), requests: &[0, 1], horizon: 6, ..ONE },
    Scenario { name: "clear before", tokens: &[1, 2], clear: Some(0), requests: &[0, 1], horizon: 6, ..ONE },
    Scenario { name: "reader", reader: true, requests: &[0], ..ONE },
    Scenario { name: "slow reader", reader: true, requests: &[0], skew: 1, horizon: 3, ..ONE },
    Scenario { name: "three requests", requests: &[0, 0, 0], ..LONG },
    Scenario { name: "skewed clocks, longer", skew: 1, horizon: 9, ..LONG },
    Scenario {
        name: "late add and clear",
        tokens: &[1, 2],
        clear: Some(1),
        given_up: true,
        requests: &[0, 1],
        ..LONG
    },
    Scenario {
        name: "late clear",
        tokens: &[1, 1],
        clear: Some(0),
        given_up: true,
        requests: &[0, 1],
        ..LONG
    },
    Scenario { name: "reader and resolver", reader: true, ..LONG },
    Scenario {
        name: "rivals",
        given_up: true,
        requests: &[0],
        workers: 2,
        accept_limit: 0,
        horizon: 6,
        ..LONG
    },
    Scenario { name: "atomic", atomic: true, ..LONG },
    Scenario { name: "atomic, skewed", atomic: true, requests: &[0], skew: 1, horizon: 6, ..LONG },
    ATOMIC_WORKERS,
    Scenario { name: "atomic, two shards", quick: false, shards: 2, ..ATOMIC_WORKERS },
    Scenario {
        name: "retention",
        given_up: true,
        requests: &[0],
        accept_limit: 0,
        retention: Some(6),
        horizon: 11,
        ..LONG
    },
    CANCEL,
    Scenario { name: "cancel, retried", quick: false, cancels: 2, horizon: 5, ..CANCEL },
    Scenario { name: "cancel, skewed", quick: false, skew: 1, horizon: 5, ..CANCEL },
    Scenario { name: "cancel, reader", quick: false, reader: true, ..CANCEL },
    Scenario { name: "cancel, atomic", quick: false, atomic: true, ..CANCEL },
    CANCEL_BY_WORKERS,
    Scenario { name: "cancel, atomic, two shards", workers: 2, shards: 2, horizon: 3, ..CANCEL_BY_WORKERS },
    TWO_SLICES,
    Scenario { name: "two slices, reader", quick: false, reader: true, ..TWO_SLICES },
];
