//! A changed accept limit: its announcement and its change land at any time, or never, and processes
//! use copies of the directory of namespaces that are some time old.
//!
//! One token; the limits of the slice that it lies in. A copy is one of the versions that were the
//! latest within the last `AGE` ticks, so processes need none of their own.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;

type Time = i8;

const TOKEN: Time = 5;
const WINDOW: Time = 1;
const SHORT: Time = 0;
const LONG: Time = 2;
const WRITE_TIMEOUT: Time = 1;
/// How far two clocks differ at most: each reading is of now, or by so much behind it.
const SKEW: Time = 1;
/// How old a copy in use is at most: `DIRECTORY_AGE_MAX_US`.
const AGE: Time = 3;
const HORIZON: Time = 11;
const REQUESTS: usize = 2;
const CHANGES: usize = 2;

pub struct Scenario {
    pub name: &'static str,
    first: Time,
    /// The accept limits that clients ask for, at any time.
    wanted: [Time; CHANGES],
}

pub const SCENARIOS: &[Scenario] = &[
    Scenario { name: "eras, longer", first: SHORT, wanted: [LONG, SHORT] },
    Scenario { name: "eras, shorter", first: LONG, wanted: [SHORT, LONG] },
];

/// A version of the namespace: the limits in the token's slice, `accept_limit_at` and
/// `closing_limit_at`, and for how long it has not been the latest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Version {
    accept: Time,
    closing: Time,
    age: Time,
}

/// How far a change is: `Namespaces.update`. An era that begins after the token changes nothing here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Change {
    New,
    /// The announcement is sent: the era's start, and the version that it compares with.
    Announcing(Time, usize),
    Announced(Time, usize),
    Changing(usize),
    Over,
}

/// How far a request is: `EventWriter.write_admitted`, then `Resolver.resolve`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    New,
    /// Its age was checked at this instant, and the event is sent.
    Sent(Time),
    Late,
    /// A resolver found nothing in a closed window.
    NotFound,
    Over,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    versions: Vec<Version>,
    changes: [Change; CHANGES],
    requests: [Step; REQUESTS],
    stored: bool,
    void: bool,
    /// The watermark has passed the token's window; it is in the count.
    passed: bool,
    counted: bool,
    acknowledged: bool,
}

pub struct Eras {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

impl Eras {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn clocks(&self, s: &State) -> [Time; 2] {
        [s.now, s.now - SKEW]
    }

    /// The versions that a process may use; *rule* is that its copy is young enough.
    fn copies<'a>(&self, s: &'a State, rule: Rule) -> impl Iterator<Item = &'a Version> {
        let is_any = self.breaks(rule);
        s.versions.iter().filter(move |each| is_any || each.age <= AGE)
    }

    /// `closes_at`.
    fn closes_at(&self, copy: &Version) -> Time {
        TOKEN + WINDOW + copy.closing + WRITE_TIMEOUT + SKEW
    }

    /// `_reached_us`: the latest event that may be written by a copy from before now.
    fn reached(&self, clock: Time) -> Time {
        clock + SKEW + if self.breaks(Rule::EraCopies) { 0 } else { AGE }
    }

    fn change(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let limit = self.scenario.wanted[at];
        let mut push = |what: &'static str, step: Change, version: Option<(Time, Time)>| {
            let mut next = s.clone();
            next.changes[at] = step;
            if let Some((accept, closing)) = version {
                next.versions.push(Version { accept, closing, age: 0 });
                let latest = next.versions.len() - 1;
                // Its age is the time since it was replaced.
                next.versions[latest - 1].age = 0;
            }
            out.push((("change", what), next));
        };
        let latest = s.versions.len() - 1;
        let present = s.versions[latest];
        match s.changes[at] {
            Change::New => {
                for clock in self.clocks(s) {
                    let from = self.reached(clock) + 1;
                    if from <= TOKEN {
                        push("sends its announcement", Change::Announcing(from, latest), None);
                    }
                }
            }
            Change::Announcing(_, base) | Change::Changing(base) if base != latest => {
                push("meets another version", Change::Over, None)
            }
            Change::Announcing(..) if self.breaks(Rule::EraAnnounced) => {
                push("lands", Change::Over, Some((limit, limit)))
            }
            Change::Announcing(from, base) => {
                let shorter = present.accept.min(limit);
                let longer = present.closing.max(limit);
                let accept = if self.breaks(Rule::AcceptedByShorter) { present.accept } else { shorter };
                let closing = if self.breaks(Rule::ClosedByLonger) { present.closing } else { longer };
                push(
                    "has its announcement landed",
                    Change::Announced(from, base + 1),
                    Some((accept, closing)),
                );
            }
            Change::Announced(from, base) => {
                for clock in self.clocks(s) {
                    if self.reached(clock) < from || self.breaks(Rule::AnnouncedInTime) {
                        push("sends its change", Change::Changing(base), None);
                    } else {
                        push("gives up", Change::Over, None);
                    }
                }
            }
            Change::Changing(_) => push("lands", Change::Over, Some((limit, limit))),
            Change::Over => {}
        }
    }

    fn request(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Step, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.requests[at] = step;
            change(&mut next);
            next.requests.sort();
            out.push((("request", what), next));
        };
        match s.requests[at] {
            Step::New => {
                for copy in self.copies(s, Rule::WrittenByFreshCopy) {
                    for clock in self.clocks(s) {
                        if clock > TOKEN + copy.accept {
                            push("is late", Step::Late, &|_| {});
                        } else if clock >= TOKEN {
                            push("sends its event", Step::Sent(s.now), &|_| {});
                        }
                    }
                }
            }
            Step::Sent(began) => {
                let in_time = s.now - began <= WRITE_TIMEOUT;
                push("has its event landed", Step::Over, &|next| {
                    next.stored = true;
                    next.acknowledged |= in_time;
                });
            }
            Step::Late if s.stored => push("finds its event, and has it recounted", Step::Over, &|next| {
                next.acknowledged = true;
                next.counted |= next.passed;
            }),
            Step::Late => {
                for copy in self.copies(s, Rule::DecidedByFreshCopy) {
                    if self.clocks(s).iter().any(|clock| *clock >= self.closes_at(copy)) {
                        push("finds nothing in a closed window", Step::NotFound, &|_| {});
                    }
                }
            }
            Step::NotFound => push("decides that the token is void", Step::Over, &|next| next.void = true),
            Step::Over => {}
        }
    }

    /// `RollupWorker.roll_shard`: clock, copy, and the sum of the window.
    fn roll(&self, s: &State, out: &mut Vec<(Label, State)>) {
        for copy in self.copies(s, Rule::ClosedByFreshCopy) {
            if !s.passed && s.now >= self.closes_at(copy) {
                let mut next = s.clone();
                next.passed = true;
                next.counted = s.stored;
                out.push((("worker", "passes the window"), next));
            }
        }
    }
}

impl Model for Eras {
    type State = State;

    fn initial(&self) -> State {
        let first = self.scenario.first;
        State {
            now: 0,
            versions: vec![Version { accept: first, closing: first, age: 0 }],
            changes: [Change::New; CHANGES],
            requests: [Step::New; REQUESTS],
            stored: false,
            void: false,
            passed: false,
            counted: false,
            acknowledged: false,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            let mut later = s.clone();
            later.now += 1;
            let latest = later.versions.len() - 1;
            for each in &mut later.versions[..latest] {
                each.age = (each.age + 1).min(AGE + 1);
            }
            out.push((("time", "passes"), later));
        }
        for at in 0..CHANGES {
            self.change(s, at, out);
        }
        for at in 0..REQUESTS {
            self.request(s, at, out);
        }
        self.roll(s, out);
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.acknowledged && s.void {
            return Some("a definite answer about a token never changes");
        }
        if s.acknowledged && s.passed && !s.counted {
            return Some("an acknowledged add counts once its window is rolled up");
        }
        None
    }

    const SITUATIONS: &'static [Situation<Eras>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Eras>] = &[
    ("an announcement lands when its era has begun", |_, s| {
        s.changes.iter().any(|each| matches!(each, Change::Announced(from, _) if s.now >= *from))
    }),
    ("a change lands when a window of its era is closed", |_, s| {
        let latest = s.versions[s.versions.len() - 1];
        s.passed && latest.age == 0 && latest.accept == latest.closing && s.versions.len() > 2
    }),
    ("an announcement lands upon one that was given up", |_, s| {
        s.versions.len() > 2 && s.versions[1..].iter().all(|each| each.accept < each.closing)
    }),
    ("an add of an era is accepted by the longer limit", |m, s| {
        m.scenario.first == SHORT && s.acknowledged && s.now > TOKEN + SHORT + SKEW + WRITE_TIMEOUT
    }),
    ("a token of a slice with a changed limit is void", |_, s| s.void && s.versions.len() > 2),
];
