//! The state of the protocol over a store without transactions.
//!
//! A window is one tick long: so a window, its start and its last instant are the same number, and
//! there is no slack between the last instant of a window and the events in it.

use std::ops::{Deref, DerefMut};

pub use crate::times::{Time, Times};

/// How many tokens, items, counters and windows with events a scenario has at most.
pub const TWO: usize = 2;
pub const REQUESTS: usize = 3;
pub const WORKERS: usize = 2;

/// How often a count includes each item: each add has a digit of its own. Of a fold of events, also
/// whether it has a clear: then it has only what is later.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Count(pub [i8; TWO], pub bool);

impl Count {
    /// `apply_fold`, if *other* is a fold of later events.
    pub fn plus(self, other: Count) -> Count {
        if other.1 {
            return other;
        }
        Count([self.0[0] + other.0[0], self.0[1] + other.0[1]], self.1)
    }

    pub fn minus(self, other: Count) -> Count {
        Count([self.0[0] - other.0[0], self.0[1] - other.0[1]], self.1)
    }

    /// Without what was before it, a count needs no clear.
    pub fn without_clear(self) -> Count {
        Count(self.0, false)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Outcome {
    Applied,
    Void,
    /// Whether it was counted.
    Cancelled(bool),
}

impl Outcome {
    pub fn is_cancelled(self) -> bool {
        matches!(self, Outcome::Cancelled(_))
    }
}

/// `Sight`: what no worker can have missed that has passed a mark of the atomic add.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Sight {
    Nothing,
    /// That it is decided.
    Decision,
    /// That it is cancelled.
    Cancel,
}

impl Sight {
    pub fn of(outcome: Outcome) -> Sight {
        match outcome {
            Outcome::Cancelled(_) => Sight::Cancel,
            _ => Sight::Decision,
        }
    }
}

/// Of each sight, the windows in which the atomic add has a mark with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Marks(pub [Times; 3]);

impl Marks {
    pub fn all(self) -> Times {
        self.0[0].with(self.0[1]).with(self.0[2])
    }

    pub fn of(self, sight: Sight) -> Times {
        self.0[sight as usize]
    }

    pub fn add(&mut self, sight: Sight, window: Time) {
        self.0[sight as usize].add(window);
    }

    pub fn between(self, after: Time, through: Time) -> Marks {
        Marks(self.0.map(|each| each.between(after, through)))
    }

    pub fn with(mut self, others: Marks) -> Marks {
        for (mine, other) in self.0.iter_mut().zip(others.0) {
            *mine = mine.with(other);
        }
        self
    }

    pub fn without(mut self, others: Marks) -> Marks {
        for (mine, other) in self.0.iter_mut().zip(others.0) {
            mine.remove(other);
        }
        self
    }

    /// The windows without a mark that has *sight*.
    pub fn lacking(self, sight: Sight) -> Times {
        let mut windows = self.all();
        windows.remove(self.of(sight));
        windows
    }
}

/// What a look-up of a token's events found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Events {
    None,
    Some,
    All,
}

/// How far a request is. After `Sent`, it resolves a late token; so does a worker. A cancel takes the
/// same steps with the outcome `Cancelled`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    /// Not sent yet.
    New,
    /// Its mark is durable.
    Marked,
    /// Its age was checked; only if the deadline's clock is read after that.
    Checked,
    /// The event is on its way, and the deadline began.
    Sent(Time),
    /// Looked up; only if the clock is read after that.
    Looked(Events),
    Proposing(Outcome),
    /// An atomic add is marked again, in this window; the mark may not have landed yet.
    Marking(Outcome, Time),
    /// That mark was in time. The one beside it, which names the decision, may not have landed yet.
    Naming(Outcome, Time),
    Decided(Outcome),
    /// The events are written again, or hidden.
    Enforced(Outcome),
    /// Recounts are left for readers, in this window.
    Left(Outcome, Time),
    /// Answered, or not, by a time-out, by `token_pending` or because the outcome is unknown.
    Over,
}

/// What a worker read before it rolls a batch up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Batch {
    pub shard: usize,
    /// Where the watermark goes.
    pub through: Time,
    /// The last window with a mark: `Batch.through_us`.
    pub reaches: Time,
    pub dropped_before: Time,
    /// For each counter, the windows with marks of adds and of recounts.
    pub adds: [[bool; TWO]; TWO],
    pub recounts: [[bool; TWO]; TWO],
}

/// A counter as a worker read it, and the windows to sum: `Plan`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Plan {
    pub head: Head,
    pub rows: [Option<Count>; TWO],
    pub sums: [bool; TWO],
    pub whole: bool,
    pub settles: bool,
}

/// What a worker writes of a counter: `CounterUpdate`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Update {
    pub rows: [Option<Count>; TWO],
    pub checkpoint: (Time, Count),
    pub settled: Option<(Time, Count)>,
    pub pending_done: [Times; TWO],
    /// Only the recounts that are done are left to be removed.
    pub is_written: bool,
}

/// How a worker settles an atomic add.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Settling {
    /// The marks that it read.
    pub marks: Marks,
    /// None: it was not looked up yet.
    pub step: Option<Step>,
    pub by: By,
}

/// Who resolves a token, or cancels it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum By {
    Client,
    Cancel,
    /// A worker that found no decision about an atomic add.
    Worker,
    /// One that found a decision.
    WorkerThatFound,
    /// One that found a decision, and a mark that names it.
    WorkerThatAdopts(Sight),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Worker {
    Idle,
    /// Marks were read, then the clock; only if that order is broken.
    Unclocked(Batch),
    Settling(Batch, Settling),
    Marked(Batch),
    /// Heads were read, and rows must be.
    Headed(Batch, [Option<Plan>; TWO]),
    Planned(Batch, [Option<Plan>; TWO]),
    Summed(Batch, [Option<Update>; TWO]),
    Advancing(usize, Time),
}

/// Checkpoint, settled and pending recounts, as one query reads them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Head {
    pub checkpoint: (Time, Count),
    pub settled: (Time, Count),
    /// For each window, the windows that its recounts were left in.
    pub pending: [Times; TWO],
}

/// What is stored of one counter.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Counter {
    pub head: Head,
    pub rows: [Option<Count>; TWO],
    /// The write timestamps of the checkpoint and of the rows.
    pub checkpoint_stamp: Time,
    pub row_stamps: [Time; TWO],
    /// Pending recounts that were removed: the same ones cannot be left again.
    pub removed: [Times; TWO],
    /// Marks of adds and of recounts, in windows after the watermark.
    pub marks: [bool; TWO],
    pub recounts: [Times; TWO],
}

/// A reader of counter 0. `owed` are the items that it must see, `refused` those that it must not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reader {
    New,
    Watermarked {
        watermark: Time,
        owed: [bool; TWO],
        refused: [bool; TWO],
    },
    /// Only if the checkpoint is read before the watermark.
    HeadFirst {
        head: Head,
        owed: [bool; TWO],
        refused: [bool; TWO],
    },
    Headed {
        watermark: Time,
        head: Head,
        owed: [bool; TWO],
        refused: [bool; TWO],
    },
    Rowed {
        watermark: Time,
        head: Head,
        rows: [Option<Count>; TWO],
        owed: [bool; TWO],
        refused: [bool; TWO],
    },
    Stored {
        as_of: Time,
        count: Count,
        owed: [bool; TWO],
        refused: [bool; TWO],
    },
}

/// A client that asks for a recount of the first window of counter 0, once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Asker {
    New,
    /// The window has a row, and its slice was not dropped.
    Found,
    Over,
}

/// Everything: the processes, and what they share.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub now: Time,
    pub requests: [Step; REQUESTS],
    pub workers: [Worker; WORKERS],
    pub reader: Reader,
    pub asker: Asker,
    pub store: Store,
}

impl Deref for State {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl DerefMut for State {
    fn deref_mut(&mut self) -> &mut Store {
        &mut self.store
    }
}

/// What is stored, what is in flight, and what clients were answered.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Store {
    /// Of each item: a write of it may land; it has landed; a tombstone hides it.
    pub sent: [bool; TWO],
    pub landed: [bool; TWO],
    pub hidden: [bool; TWO],
    /// Of each token.
    pub decided: [Option<Outcome>; TWO],
    /// Of each shard.
    pub watermarks: [Time; TWO],
    pub counters: [Counter; TWO],
    /// Of each shard, the marks of the atomic add, and those in flight: each lands at any time, or never.
    pub atomic_marks: [Marks; TWO],
    pub marks_sent: [Marks; TWO],
    /// The marks of the atomic add that were settled by the workers' process.
    pub settled: Marks,
    /// The slice with all the events was retired, and when; `dropped_before`; its table is gone.
    pub retired: Option<Time>,
    pub dropped_before: Time,
    pub table_gone: bool,
    /// What clients were answered, of each token.
    pub acknowledged: [bool; TWO],
    pub refused: [bool; TWO],
    /// That it was cancelled, and whether it was counted.
    pub cancelled: [Option<bool>; TWO],
    /// A reader got a count that it must not get.
    pub misread: bool,
    /// A client got an answer that contradicts the one that the token was cancelled.
    pub contradicted: bool,
}
