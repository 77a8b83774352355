//! The fence of PostgreSQL: appends that stall, a worker, and resolvers.
//!
//! One token at instant 1. The server's clock may be behind by one tick at any reading, as after a
//! failover. A window closes without the write time-out and the skew, because only the fence is
//! shown to be right here.

pub mod traces;

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;

type Time = i8;

const TOKEN: Time = 1;
const WINDOW: Time = 1;
const ACCEPT_LIMIT: Time = 1;
const HORIZON: Time = 6;
const REQUESTS: usize = 3;

/// How far a request is: `append` in functions.sql, then `Resolver.resolve` and
/// `PostgresqlDecisions.decide`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    New,
    /// It has read its clock and the fence, and not yet locked; only if that order is broken.
    Unlocked {
        now: Time,
        open: bool,
    },
    /// It holds the lock from here to its commit.
    Locked,
    Fresh,
    /// It is to be inserted, and the lock is gone; only if that rule is broken.
    Released,
    Late,
    /// The event was not found, and its window is closed.
    NotFound,
    /// The decision is open. The requests that held the lock then have not ended.
    Waiting([bool; REQUESTS]),
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Worker {
    Idle,
    Waiting(Time, [bool; REQUESTS]),
    Summed(Time, bool),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Decision {
    Open,
    Applied,
    Void,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    requests: [Step; REQUESTS],
    worker: Worker,
    fence: Time,
    /// The event is committed; it is in the count.
    stored: bool,
    counted: bool,
    /// The watermark: `namespaces.passed`.
    passed: Time,
    decision: Option<Decision>,
    acknowledged: bool,
    refused: bool,
}

pub struct Fence {
    pub broken: Option<Rule>,
}

impl Fence {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn clocks(&self, s: &State) -> [Time; 2] {
        [s.now, s.now - 1]
    }

    /// `append`, which calls `late`: lock, clock, checks, insert, commit.
    fn append(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Step, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.requests[at] = step;
            change(&mut next);
            out.push((("request", what), next));
        };
        let refuses = s.decision.is_some() && s.decision != Some(Decision::Applied);
        let open = refuses && !(self.breaks(Rule::OpenRefused) && s.decision == Some(Decision::Open));
        match s.requests[at] {
            Step::New if self.breaks(Rule::LockBeforeClock) => {
                for clock in self.clocks(s) {
                    let now = clock.max(s.fence);
                    push("reads the clock", Step::Unlocked { now, open }, &|_| {});
                }
            }
            Step::New => push("locks", Step::Locked, &|_| {}),
            Step::Unlocked { now, open } => push("locks", self.checked(s, now, open), &|_| {}),
            Step::Locked => {
                for clock in self.clocks(s) {
                    let fence = if self.breaks(Rule::FenceInAppend) { clock } else { s.fence };
                    push("checks its age", self.checked(s, clock.max(fence), open), &|_| {});
                }
            }
            Step::Fresh if self.breaks(Rule::LockUntilCommit) => {
                push("lets go of its lock", Step::Released, &|_| {})
            }
            Step::Fresh | Step::Released => push("commits, and is acknowledged", Step::Over, &|next| {
                next.stored = true;
                next.acknowledged = true;
            }),
            _ => {}
        }
        if matches!(s.requests[at], Step::Locked | Step::Fresh) {
            push("is rolled back", Step::Over, &|_| {});
        }
    }

    fn checked(&self, s: &State, now: Time, open: bool) -> Step {
        let is_late = TOKEN <= s.passed || TOKEN < now - ACCEPT_LIMIT || open;
        if is_late {
            Step::Late
        } else {
            Step::Fresh
        }
    }

    /// Which requests hold the lock: `_HOLDERS` in fence.py.
    fn holders(&self, s: &State) -> [bool; REQUESTS] {
        // One that is rejected as late ends its transaction at once.
        s.requests.map(|step| matches!(step, Step::Locked | Step::Fresh))
    }

    fn have_ended(&self, s: &State, waited: &[bool; REQUESTS]) -> bool {
        let held = self.holders(s);
        (0..REQUESTS).all(|at| !(waited[at] && held[at]))
    }

    /// `Resolver.resolve`, `PostgresqlDecisions.decide`.
    fn resolve(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Step, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.requests[at] = step;
            change(&mut next);
            out.push((("request", what), next));
        };
        match s.requests[at] {
            Step::Late if s.stored => {
                push("finds its event, and is acknowledged", Step::Over, &|next| next.acknowledged = true)
            }
            Step::Late if s.now >= TOKEN + WINDOW + ACCEPT_LIMIT => {
                push("finds nothing in a closed window", Step::NotFound, &|_| {})
            }
            Step::NotFound => match s.decision {
                Some(Decision::Applied) => {
                    push("adopts the decision", Step::Over, &|next| next.acknowledged = true)
                }
                Some(Decision::Void) => push("adopts the decision", Step::Over, &|next| next.refused = true),
                _ => {
                    let held =
                        if self.breaks(Rule::DecisionWaits) { [false; REQUESTS] } else { self.holders(s) };
                    push("notes that a decision is open", Step::Waiting(held), &|next| {
                        if !self.breaks(Rule::OpenFirst) {
                            next.decision = Some(Decision::Open);
                        }
                    });
                }
            },
            Step::Waiting(held) if self.have_ended(s, &held) => {
                let is_found = s.stored && !self.breaks(Rule::LookAgain);
                let looked = if is_found { Decision::Applied } else { Decision::Void };
                let settled = match s.decision {
                    Some(first) if first != Decision::Open => first,
                    _ => looked,
                };
                push("looks again, and settles the decision", Step::Over, &|next| {
                    next.decision = Some(settled);
                    next.acknowledged |= settled == Decision::Applied;
                    next.refused |= settled == Decision::Void;
                });
            }
            _ => {}
        }
    }

    /// `pass_fence`, then the sums of the windows that are closed, and their watermark.
    fn roll(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, worker: Worker, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.worker = worker;
            change(&mut next);
            out.push((("worker", what), next));
        };
        match s.worker {
            Worker::Idle => {
                for clock in self.clocks(s) {
                    let fence = clock.max(s.fence);
                    let held =
                        if self.breaks(Rule::FenceWaits) { [false; REQUESTS] } else { self.holders(s) };
                    push("moves the fence", Worker::Waiting(fence, held), &|next| {
                        if !self.breaks(Rule::FenceMoves) {
                            next.fence = fence;
                        }
                    });
                }
            }
            Worker::Waiting(fence, held) if self.have_ended(s, &held) => {
                let closed = fence - ACCEPT_LIMIT - WINDOW;
                let is_summed = s.stored && TOKEN <= closed;
                push("sums closed windows", Worker::Summed(closed, is_summed), &|_| {});
            }
            Worker::Waiting(..) => push("gives up", Worker::Idle, &|_| {}),
            Worker::Summed(closed, is_summed) => push("writes sums and watermark", Worker::Idle, &|next| {
                if closed >= TOKEN && next.passed < TOKEN {
                    next.counted = is_summed;
                }
                next.passed = next.passed.max(closed);
            }),
        }
    }
}

impl Model for Fence {
    type State = State;

    fn initial(&self) -> State {
        State {
            now: 1,
            requests: [Step::New; REQUESTS],
            worker: Worker::Idle,
            fence: 0,
            stored: false,
            counted: false,
            passed: -1,
            decision: None,
            acknowledged: false,
            refused: false,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            let mut later = s.clone();
            later.now += 1;
            out.push((("time", "passes"), later));
        }
        for at in 0..REQUESTS {
            self.append(s, at, out);
            self.resolve(s, at, out);
        }
        self.roll(s, out);
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.acknowledged && s.refused {
            return Some("a definite answer about a token never changes");
        }
        if s.stored && s.refused {
            return Some("a refused add never counts");
        }
        if s.stored != s.counted && s.passed >= TOKEN {
            return Some("the sum of a closed window is the sum of its events");
        }
        None
    }

    const SITUATIONS: &'static [Situation<Fence>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Fence>] = &[
    ("an append has stalled until a fence beyond its accept limit", |_, s| {
        s.requests.contains(&Step::Fresh) && s.fence > TOKEN + ACCEPT_LIMIT
    }),
    ("a decision is open, and the event of its token is stored", |_, s| {
        s.decision == Some(Decision::Open) && s.stored
    }),
    ("an open decision is settled as applied", |_, s| s.decision == Some(Decision::Applied)),
    ("an open decision is settled as void", |_, s| s.decision == Some(Decision::Void)),
    ("the fence is later than the server's clock", |_, s| s.fence >= s.now && s.now > 1),
    ("a window with the event is rolled up", |_, s| s.counted),
];
