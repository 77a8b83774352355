//! Arbitrary keys: `CounterService._with_token` (counter/core/service.py), `reserve`
//! (counter/storage/cassandra/decisions.py).
//!
//! Of the events only that matters here which `log` shows to be right: a token that is decided void
//! never counts, any other counts once its event has landed.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;
use crate::times::{Time, Times};

const WINDOW: Time = 1;
const WRITE_TIMEOUT: Time = 1;
/// How far the clock of the machine is set ahead, once.
const STEP: Time = 6;
const REQUESTS: usize = 3;
/// No reading of a clock is as late.
const NEVER: usize = 24;

pub struct Scenario {
    pub name: &'static str,
    /// How many requests with the key may be under way at once.
    pub requests: usize,
    pub skew: Time,
    pub key_ttl: Time,
    pub accept_limit: Time,
    /// One process with transactions, whose clock may be set ahead.
    pub embedded: bool,
    pub horizon: Time,
}

const TWO: Scenario = Scenario {
    name: "keys",
    requests: 2,
    skew: 1,
    key_ttl: 8,
    accept_limit: 0,
    embedded: false,
    horizon: 11,
};

pub const SCENARIOS: &[Scenario] = &[
    TWO,
    Scenario { name: "keys, three requests", requests: 3, skew: 0, key_ttl: 4, horizon: 8, ..TWO },
    Scenario { name: "keys, clock set", skew: 0, embedded: true, horizon: 8, ..TWO },
];

/// How far a request is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    New,
    /// It has read its clock: the reading, and when that was. *old* is the void time to replace.
    Keyed {
        reading: Time,
        since: Time,
        old: Option<Time>,
    },
    /// It has seen that it may write; only if it does not compare.
    Writing {
        reading: Time,
        since: Time,
    },
    /// It has a token.
    Holding(Time),
    /// The event is on its way, and the deadline began.
    Sent(Time, Time),
    /// It is late and looked up: whether an event was found.
    Looked(Time, bool),
    /// The token is void, so the key gets a new time.
    Stale(Time),
    Over,
}

/// What is stored of the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Row {
    time: Time,
    expires: Time,
}

/// The sets have the times of tokens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    set_ahead: bool,
    requests: [Step; REQUESTS],
    row: Option<Row>,
    sent: Times,
    landed: Times,
    applied: Times,
    void: Times,
    acknowledged: Times,
    /// For each token, when the clock was read from which it has its time; 0 if there is none.
    since: [Time; NEVER],
}

impl State {
    /// The tokens that count, now or at the end.
    fn counted(&self) -> Times {
        let mut counted = self.landed;
        counted.remove(self.void);
        counted
    }
}

pub struct Keys {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

impl Keys {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn readings(&self, s: &State, skew: Time) -> std::ops::RangeInclusive<Time> {
        let wall = s.now + if s.set_ahead { STEP } else { 0 };
        (wall - skew).max(0)..=wall + skew
    }

    /// `checked_now_us`, from which the times of keys are.
    fn checked(&self, s: &State) -> std::ops::RangeInclusive<Time> {
        let off = if self.breaks(Rule::KeyClockChecked) { 2 } else { 0 };
        self.readings(s, self.scenario.skew + off)
    }

    fn request(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Step, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.requests[at] = step;
            change(&mut next);
            out.push((("request", what), next));
        };
        match s.requests[at] {
            Step::New => {
                for reading in self.checked(s) {
                    push("reads its clock", Step::Keyed { reading, since: s.now, old: None }, &|_| {});
                }
            }
            Step::Stale(time) => {
                for reading in self.checked(s) {
                    let step = Step::Keyed { reading, since: s.now, old: Some(time) };
                    push("reads its clock again", step, &|_| {});
                }
            }
            Step::Keyed { reading, since, old } => match self.kept(s, reading, old) {
                Some(_) if self.breaks(Rule::KeyAdopted) => {
                    push("goes by its own time", Step::Holding(reading), &|next| {
                        self.note(next, reading, since)
                    });
                }
                Some(time) => push("is given the time of its key", Step::Holding(time), &|_| {}),
                None if self.breaks(Rule::KeyCompared) => {
                    push("sees that it may write", Step::Writing { reading, since }, &|_| {})
                }
                None => {
                    push("reserves a time", Step::Holding(reading), &|next| self.write(next, reading, since))
                }
            },
            Step::Writing { reading, since } => {
                push("writes a time", Step::Holding(reading), &|next| self.write(next, reading, since))
            }
            Step::Holding(time) => {
                for reading in self.readings(s, self.scenario.skew) {
                    if time >= reading - self.scenario.accept_limit {
                        push("sends its event", Step::Sent(time, s.now), &|next| next.sent.add(time));
                    } else if self.breaks(Rule::KeyUntilVoid) {
                        push("is late", Step::Stale(time), &|_| {});
                    } else if s.landed.has(time) || reading >= self.closes_at(time) {
                        let found = s.landed.has(time);
                        push("is late, and looks its event up", Step::Looked(time, found), &|_| {});
                    }
                }
            }
            Step::Sent(time, began) if s.now - began <= WRITE_TIMEOUT && self.may_land(s, time) => {
                push("its event lands, and it is acknowledged", Step::Over, &|next| {
                    next.landed.add(time);
                    next.acknowledged.add(time);
                });
            }
            Step::Looked(time, found) if self.is_applied(s, time, found) => {
                push("decides, and is acknowledged", Step::Over, &|next| {
                    next.applied.add(time);
                    next.landed.add(time);
                    next.acknowledged.add(time);
                });
            }
            Step::Looked(time, _) => {
                push("decides that its token is void", Step::Stale(time), &|next| next.void.add(time))
            }
            _ => {}
        }
    }

    /// With transactions, an event of a void token is refused.
    fn may_land(&self, s: &State, time: Time) -> bool {
        !(self.scenario.embedded && s.void.has(time))
    }

    /// The first decision is final. With transactions, it is made where the event is looked up again.
    fn is_applied(&self, s: &State, time: Time, found: bool) -> bool {
        let found = found || self.scenario.embedded && s.landed.has(time);
        s.applied.has(time) || found && !s.void.has(time)
    }

    /// Return the time that the key keeps, if it is not to have that of *reading*.
    fn kept(&self, s: &State, reading: Time, old: Option<Time>) -> Option<Time> {
        let row = s.row?;
        if old == Some(row.time) || old.is_some() && self.breaks(Rule::OldTimeCompared) {
            return None;
        }
        let followed = if s.set_ahead && !self.breaks(Rule::KeyAfterStep) { STEP } else { 0 };
        // A time that replaced another one is not looked at for its expiry.
        let is_kept = row.expires > reading - followed || old.is_some();
        is_kept.then_some(row.time)
    }

    fn write(&self, s: &mut State, reading: Time, since: Time) {
        s.row = Some(Row { time: reading, expires: reading + self.scenario.key_ttl });
        self.note(s, reading, since);
    }

    fn note(&self, s: &mut State, reading: Time, since: Time) {
        let known = &mut s.since[reading as usize];
        if *known == 0 {
            *known = since;
        }
    }

    fn closes_at(&self, time: Time) -> Time {
        time + WINDOW + self.scenario.accept_limit + WRITE_TIMEOUT + 2 * self.scenario.skew
    }
}

impl Model for Keys {
    type State = State;

    const SITUATIONS: &'static [Situation<Keys>] = SITUATIONS;

    fn initial(&self) -> State {
        State {
            now: 1,
            set_ahead: false,
            requests: [Step::New; REQUESTS],
            row: None,
            sent: Times::default(),
            landed: Times::default(),
            applied: Times::default(),
            void: Times::default(),
            acknowledged: Times::default(),
            since: [0; NEVER],
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < self.scenario.horizon {
            let mut later = s.clone();
            later.now += 1;
            out.push((("time", "passes"), later));
        }
        if self.scenario.embedded && !s.set_ahead {
            let mut set = s.clone();
            set.set_ahead = true;
            out.push((("clock", "is set ahead, and followed"), set));
        }
        for at in 0..self.scenario.requests {
            self.request(s, at, out);
        }
        let mut in_flight = s.sent;
        in_flight.remove(s.landed);
        for time in in_flight.all().filter(|time| self.may_land(s, *time)) {
            let mut landed = s.clone();
            landed.landed.add(time);
            out.push((("store", "a write of an event lands"), landed));
        }
        for (_, state) in out {
            state.requests[..self.scenario.requests].sort_unstable();
        }
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        let remembered = self.scenario.key_ttl - 2 * self.scenario.skew;
        let counted = s.counted();
        for time in counted.all() {
            for later in counted.all().filter(|later| *later > time) {
                if s.since[later as usize] - s.since[time as usize] < remembered {
                    return Some("a key counts once within its key_ttl");
                }
            }
        }
        let mut lost = s.acknowledged;
        lost.remove(counted);
        lost.has_any().then_some("an acknowledged key counts")
    }
}

const SITUATIONS: &[Situation<Keys>] = &[
    ("a key counts under the time that replaced a void one", |_, s| {
        s.void.first().is_some_and(|void| s.acknowledged.last() > Some(void))
    }),
    ("a key counts again after its key_ttl", |_, s| s.counted().all().count() > 1),
    ("a request holds a time that its key does not have any more", |_, s| {
        let row = s.row.map(|row| row.time);
        s.requests.iter().any(|step| matches!(step, Step::Holding(time) if Some(*time) != row))
    }),
    ("a key gets a third time", |_, s| s.since.iter().filter(|each| **each != 0).count() > 2),
    ("a reserved time is void, and its event lands", |_, s| s.void.all().any(|time| s.landed.has(time))),
    ("a key's expired time is that of an event in flight", |m, s| {
        let expired = |row: Row| row.expires <= s.now - m.scenario.skew;
        s.row.is_some_and(|row| expired(row) && s.sent.has(row.time) && !s.landed.has(row.time))
    }),
    ("a clock is set ahead of the end of a key's time", |_, s| {
        s.set_ahead && s.row.is_some_and(|row| row.expires > s.now && row.expires <= s.now + STEP)
    }),
];
