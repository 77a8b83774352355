//! The cache of counts: `CountReader` (counter/core/read.py), `BatchRoller._tell_cache`
//! (rollup/batches.py), `Cache.put_many`. It may lose anything, and a put lands at any time.
//!
//! An instant is a window: a count as of `t` has the windows up to `t`. One add is acknowledged on
//! time or never. The other one lands at any time, and is acknowledged late, by its resolution. That
//! what is stored is right is shown by other scenarios.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;

type Time = i8;

/// The time of the late add and of the one on time.
const LATE: Time = 1;
const ON_TIME: Time = 2;
/// How long after its end a window closes: an add on time is acknowledged before.
const LAG: Time = 1;
const HORIZON: Time = 6;

/// A count and what it is as of; whether it has the add on time, and the late one; and the
/// namespace's generation, which is part of the key.
type Entry = (Time, bool, bool, u8);

/// `Resolver.resolve` of the late add.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Late {
    New,
    Landed,
    /// Its recount is left in this window, for readers and for the worker.
    Recount(Time),
    /// It was acknowledged at this instant.
    Acknowledged(Time),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Worker {
    Idle,
    /// What it will write.
    Summed(Entry),
    Written(Entry),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    generation: u8,
    on_time: bool,
    acknowledged: bool,
    late: Late,
    watermark: Time,
    checkpoint: Entry,
    /// The window of the recount that readers see.
    pending: Option<Time>,
    worker: Worker,
    /// A reader has read this watermark.
    reader: Option<Time>,
    /// A reader's put that may land at any time. A worker that is slow to put is like a reader.
    put: Option<Entry>,
    cache: Option<Entry>,
}

pub struct Cached {
    pub broken: Option<Rule>,
}

impl State {
    fn has_landed(&self) -> bool {
        self.late != Late::New
    }
}

impl Cached {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    /// `Cache.put_many`.
    fn store(&self, s: &mut State, entry: Entry) {
        let is_newest = s.cache.is_none_or(|(time, ..)| time <= entry.0);
        if is_newest || self.breaks(Rule::NewestCached) {
            s.cache = Some(entry);
        }
    }

    fn adds(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if !s.on_time && s.now >= ON_TIME && s.now <= ON_TIME + LAG {
            out.push((("add", "is acknowledged"), State { on_time: true, acknowledged: true, ..s.clone() }));
        }
        let mut push = |what: &'static str, late: Late, pending: Option<Time>| {
            out.push((("late add", what), State { late, pending, ..s.clone() }));
        };
        match s.late {
            Late::New if s.now >= LATE => push("has its event landed", Late::Landed, s.pending),
            Late::Landed if s.now > LATE + LAG => {
                push("is found, and leaves its recount", Late::Recount(s.now), Some(s.now))
            }
            Late::Recount(left) if s.now <= left + LAG => {
                push("is acknowledged", Late::Acknowledged(s.now), s.pending)
            }
            Late::Recount(_) => push("leaves its recount again", Late::Recount(s.now), Some(s.now)),
            _ => {}
        }
    }

    /// `BatchRoller.roll`: sum, write, put into the cache; then the watermark moves.
    fn roll(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let (reached, has_on_time, has_late, _) = s.checkpoint;
        match s.worker {
            Worker::Idle => {
                let through = s.now - 1 - LAG;
                if through <= s.watermark {
                    return;
                }
                let sums = |time: Time| reached < time && time <= through;
                let on_time = if sums(ON_TIME) { s.on_time } else { has_on_time };
                let sums_late = sums(LATE) || s.pending.is_some() && through >= LATE;
                let late = if sums_late { s.has_landed() } else { has_late };
                let worker = Worker::Summed((through, on_time, late, s.generation));
                out.push((("worker", "sums the windows"), State { worker, ..s.clone() }));
            }
            Worker::Summed(entry) => {
                let pending = s.pending.filter(|left| *left > entry.0);
                let worker = Worker::Written(entry);
                out.push((
                    ("worker", "writes the count"),
                    State { worker, checkpoint: entry, pending, ..s.clone() },
                ));
            }
            Worker::Written(entry) => {
                let ahead = Time::from(self.breaks(Rule::PutAsOfBatch));
                let mut next = State { worker: Worker::Idle, watermark: entry.0, ..s.clone() };
                self.store(&mut next, (entry.0 + ahead, entry.1, entry.2, entry.3));
                out.push((("worker", "puts the count into the cache, and moves the watermark"), next));
            }
        }
    }

    /// `CountReader._stored`: the watermark, then the head; what it finds goes into the cache.
    fn read(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let Some(watermark) = s.reader else {
            out.push((("reader", "reads the watermark"), State { reader: Some(s.watermark), ..s.clone() }));
            return;
        };
        let (reached, has_on_time, has_late, generation) = s.checkpoint;
        let as_of = watermark.max(reached);
        let late = has_late || s.pending.is_some() && as_of >= LATE && s.has_landed();
        let on_time = has_on_time || self.breaks(Rule::TailNotCached) && s.on_time;
        let put = Some((as_of, on_time, late, generation));
        out.push((("reader", "reads the head, and sends a put"), State { reader: None, put, ..s.clone() }));
    }

    fn cache(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if let Some(entry) = s.put {
            let mut next = State { put: None, ..s.clone() };
            self.store(&mut next, entry);
            out.push((("cache", "takes a count"), next));
        }
        if s.cache.is_some() {
            out.push((("cache", "forgets a count"), State { cache: None, ..s.clone() }));
        }
    }
}

impl Model for Cached {
    type State = State;

    fn initial(&self) -> State {
        State {
            now: LATE,
            generation: 1,
            on_time: false,
            acknowledged: false,
            late: Late::New,
            watermark: LATE - 1,
            checkpoint: (LATE - 1, false, false, 1),
            pending: None,
            worker: Worker::Idle,
            reader: None,
            put: None,
            cache: None,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            out.push((("time", "passes"), State { now: s.now + 1, ..s.clone() }));
        }
        self.cache(s, out);
        if s.generation > 1 {
            return;
        }
        self.adds(s, out);
        self.roll(s, out);
        if s.worker != Worker::Idle {
            out.push((("worker", "stops"), State { worker: Worker::Idle, ..s.clone() }));
        }
        self.read(s, out);
        let next = State { generation: 2, worker: Worker::Idle, reader: None, ..s.clone() };
        out.push((("namespace", "is deleted and created again"), next));
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        let (time, on_time, late, generation) = s.cache?;
        if generation != s.generation {
            let is_wrong = self.breaks(Rule::CachedByNumber) && (on_time || late);
            return is_wrong.then_some("a count out of the cache is of its own namespace");
        }
        let as_of = if self.breaks(Rule::CachedAsOf) { time.max(s.watermark) } else { time };
        if on_time && as_of < ON_TIME || late && as_of < LATE {
            return Some("a count out of the cache is not newer than it says");
        }
        if s.acknowledged && as_of >= ON_TIME && !on_time {
            return Some("a count out of the cache has every add that was acknowledged on time, up to as_of");
        }
        if matches!(s.late, Late::Acknowledged(at) if as_of >= at) && !late {
            return Some("a count out of the cache has every late add that was acknowledged up to as_of");
        }
        if self.breaks(Rule::CacheNotAccurate) && s.acknowledged && !on_time {
            return Some("an accurate read has every add that was acknowledged before");
        }
        None
    }

    const SITUATIONS: &'static [Situation<Cached>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Cached>] = &[
    ("a cached count lacks an add that is acknowledged", |_, s| {
        s.acknowledged && matches!(s.cache, Some((_, false, ..)))
    }),
    (
        "a cached count lacks an add of before its as_of that was acknowledged late",
        |_, s| matches!((s.late, s.cache), (Late::Acknowledged(_), Some((time, _, false, _))) if time >= LATE),
    ),
    ("a cached count has an add that no worker has counted yet", |_, s| {
        matches!(s.cache, Some((_, _, true, _))) && !s.checkpoint.2
    }),
    ("a put lands when a newer count was put and forgotten", |_, s| {
        s.cache.is_none() && s.put.is_some_and(|put| put.0 < s.watermark)
    }),
    (
        "a put lands upon a newer count",
        |_, s| matches!((s.put, s.cache), (Some(put), Some(cached)) if put.0 < cached.0),
    ),
    ("a count of a deleted namespace is cached", |_, s| {
        s.cache.is_some_and(|(_, on_time, late, generation)| generation != s.generation && (on_time || late))
    }),
];
