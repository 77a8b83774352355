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
    /// Resolvers' marks of an atomic add land late, or never, and a worker that finds a decision leaves
    /// two. Else marks land when they are sent, and such a worker leaves none: no other worker passes it.
    pub full_marks: bool,
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
    /// The steps that were taken before, in parts.
    pub led: &'static [&'static [&'static str]],
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
    full_marks: false,
    workers: 1,
    shards: 1,
    reader: false,
    skew: 0,
    accept_limit: 1,
    retention: None,
    slice_end: None,
    recount: false,
    begins: 1,
    led: &[],
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
    full_marks: true,
    workers: 2,
    accept_limit: 0,
    horizon: 3,
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

/// The same, and what follows after given steps.
const ATOMIC_LED: Scenario = Scenario { begins: 3, horizon: 5, ..ATOMIC_WORKERS };

/// Only workers decide about the atomic add that is cancelled.
const CANCEL_BY_WORKERS: Scenario = Scenario {
    name: "cancel, atomic, longer",
    quick: false,
    atomic: true,
    requests: &[],
    horizon: 5,
    ..CANCEL
};

/// A worker that found no item decides void, after another one has found all items. Its mark is in a
/// window that the other one is about to pass.
const VOID_LATE: &[&str] = &[
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker is late, and looks its event up",
    "worker marks its atomic add again",
    "store a mark lands",
    "store a write of an event lands",
    "store a write of an event lands",
    "time passes",
    "time passes",
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker decides, but its mark may have been passed",
    "worker stops",
];

/// A worker finds that decision and marks the add again, but another one has read the marks of that
/// window before.
const ADOPTED_LATE: &[&str] = &[
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker is late, and looks its event up",
    "worker marks its atomic add again",
    "worker reads heads",
    "worker sums events",
    "worker writes a counter",
    "worker writes a counter",
    "worker moves the watermark",
    "time passes",
    "time passes",
    "worker reads the clock and the marks",
];

/// A worker decides applied and stops; another one adopts it, names it in a mark, and carries it out.
const NAMED: &[&str] = &[
    "store a write of an event lands",
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker is late, and looks its event up",
    "worker marks its atomic add again",
    "store a mark lands",
    "worker decides, or adopts the decision",
    "worker stops",
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker is late, and looks its event up",
    "worker marks its atomic add again",
    "worker decides, or adopts the decision",
    "store a mark lands",
    "worker writes an item again",
    "worker leaves a recount for readers",
    "worker has settled the atomic add",
    "worker reads heads",
    "worker reads rows",
    "worker sums events",
    "worker writes a counter",
    "worker writes a counter",
    "worker moves the watermark",
];

/// A cancel marks the add in the window of that mark, and replaces the decision after two workers that
/// are about to pass the window have found it. One of them has adopted it.
const CANCELLED_LATE: &[&str] = &[
    "cancel is late, and looks its event up",
    "cancel marks its atomic add again",
    "time passes",
    "time passes",
    "worker reads the clock and the marks",
    "worker reads the clock and the marks",
    "worker looks an atomic add up",
    "worker looks an atomic add up",
    "worker is late, and looks its event up",
    "worker decides, or adopts the decision",
    "cancel decides, but its mark may have been passed",
];

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
    Scenario { name: "atomic, two workers, longer", quick: false, horizon: 4, ..ATOMIC_WORKERS },
    Scenario { name: "atomic, void late", led: &[VOID_LATE], ..ATOMIC_LED },
    Scenario {
        name: "atomic, void late, longer",
        quick: false,
        led: &[VOID_LATE],
        recount: true,
        horizon: 6,
        ..ATOMIC_LED
    },
    Scenario {
        name: "atomic, adopted late",
        led: &[VOID_LATE, ADOPTED_LATE],
        recount: true,
        horizon: 7,
        ..ATOMIC_LED
    },
    Scenario {
        name: "atomic, two shards",
        quick: false,
        full_marks: false,
        shards: 2,
        horizon: 4,
        ..ATOMIC_WORKERS
    },
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
    Scenario { name: "cancel, atomic, named", quick: false, led: &[NAMED], cancels: 1, ..ATOMIC_LED },
    Scenario { name: "cancel, atomic, late", led: &[NAMED, CANCELLED_LATE], cancels: 1, ..ATOMIC_LED },
    Scenario { name: "cancel, atomic, two shards", workers: 2, shards: 2, horizon: 3, ..CANCEL_BY_WORKERS },
    TWO_SLICES,
    Scenario { name: "two slices, reader", quick: false, reader: true, ..TWO_SLICES },
];
