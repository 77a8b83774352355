//! The fence of PostgreSQL: appends that stall, a worker, resolvers, and cancels.
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
    /// It ends a cancel, whose recount it leaves in this window. It holds the lock.
    Ending(Time),
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Worker {
    Idle,
    Waiting(Time, [bool; REQUESTS]),
    /// How far, whether the event is in the sum, and whether it is of a recount.
    Summed(Time, bool, bool),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Decision {
    Open,
    /// It says that the token is to be cancelled.
    OpenCancel,
    Applied,
    Void,
    /// Whether it was counted.
    Cancelled(bool),
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
    /// The window in which a recount is marked, which is pending for readers.
    recount: Option<Time>,
    decision: Option<Decision>,
    acknowledged: bool,
    refused: bool,
    /// A client was answered that the token is cancelled, and whether it was counted.
    cancelled: Option<bool>,
}

pub struct Fence {
    /// How many of the requests are cancels: the last ones.
    pub cancels: usize,
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
        let is_ignored = match s.decision {
            Some(Decision::Open) => self.breaks(Rule::OpenRefused),
            Some(Decision::Cancelled(_)) => self.breaks(Rule::CancelledRefused),
            _ => false,
        };
        let open = refuses && !is_ignored;
        match s.requests[at] {
            Step::New if self.is_cancel(at) => {}
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
        if matches!(s.requests[at], Step::Locked | Step::Fresh | Step::Ending(_)) {
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
        let is_locked = !self.breaks(Rule::CancelLocks);
        s.requests.map(|step| match step {
            Step::Locked | Step::Fresh => true,
            Step::Ending(_) => is_locked,
            _ => false,
        })
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
                Some(Decision::Cancelled(was_counted)) => {
                    push("adopts the decision", Step::Over, &|next| next.cancelled = Some(was_counted))
                }
                open => {
                    let held =
                        if self.breaks(Rule::DecisionWaits) { [false; REQUESTS] } else { self.holders(s) };
                    push("notes that a decision is open", Step::Waiting(held), &|next| {
                        if !self.breaks(Rule::OpenFirst) {
                            next.decision = open.or(Some(Decision::Open));
                        }
                    });
                }
            },
            Step::Waiting(held) if self.ends_cancel(s, at) && self.have_ended(s, &held) => {
                // The lock, then the clock: it removes the event and settles when it commits.
                for clock in self.clocks(s) {
                    push("locks, to end a cancel", Step::Ending(clock.max(s.fence)), &|_| {});
                }
            }
            Step::Ending(window) => match s.decision {
                Some(Decision::Cancelled(was_counted)) => {
                    push("adopts the decision", Step::Over, &|next| next.cancelled = Some(was_counted))
                }
                _ => push("removes the event, asks for a recount, and settles", Step::Over, &|next| {
                    next.decision = Some(Decision::Cancelled(s.stored));
                    next.cancelled = Some(s.stored);
                    if s.stored && !self.breaks(Rule::CancelRecountsInPlace) {
                        next.recount = Some(window);
                    }
                    next.stored = false;
                }),
            },
            Step::Waiting(held) if self.have_ended(s, &held) => {
                let is_found = s.stored && !self.breaks(Rule::LookAgain);
                let looked = if is_found { Decision::Applied } else { Decision::Void };
                let settled = match s.decision {
                    None | Some(Decision::Open | Decision::OpenCancel) => looked,
                    Some(first) => first,
                };
                push("looks again, and settles the decision", Step::Over, &|next| {
                    next.decision = Some(settled);
                    next.acknowledged |= settled == Decision::Applied;
                    next.refused |= settled == Decision::Void;
                    if let Decision::Cancelled(was_counted) = settled {
                        next.cancelled = Some(was_counted);
                    }
                });
            }
            _ => {}
        }
    }

    fn is_cancel(&self, at: usize) -> bool {
        at >= REQUESTS - self.cancels
    }

    /// Whether request *at* settles the decision as a cancel: it is one, or it meets an open one.
    fn ends_cancel(&self, s: &State, at: usize) -> bool {
        match s.decision {
            Some(Decision::Cancelled(_)) => false,
            Some(Decision::OpenCancel) if !self.breaks(Rule::OpenCancelEnded) => true,
            _ => self.is_cancel(at),
        }
    }

    /// A cancel begins: it replaces any decision but its own by an open one.
    fn cancel(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        if s.requests[at] != Step::New {
            return;
        }
        let mut next = s.clone();
        if let Some(Decision::Cancelled(was_counted)) = s.decision {
            next.requests[at] = Step::Over;
            next.cancelled = Some(was_counted);
            out.push((("cancel", "adopts the decision"), next));
        } else {
            let held = if self.breaks(Rule::CancelAppendsEnd) { [false; REQUESTS] } else { self.holders(s) };
            next.requests[at] = Step::Waiting(held);
            next.decision = Some(Decision::OpenCancel);
            out.push((("cancel", "notes that a cancel is open"), next));
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
                let is_recount = s.recount.map_or(false, |window| window <= closed);
                push("sums closed windows", Worker::Summed(closed, is_summed, is_recount), &|_| {});
            }
            Worker::Waiting(..) => push("gives up", Worker::Idle, &|_| {}),
            Worker::Summed(closed, is_summed, is_recount) => {
                push("writes sums and watermark", Worker::Idle, &|next| {
                    if closed >= TOKEN && (next.passed < TOKEN || is_recount) {
                        next.counted = is_summed;
                    }
                    if is_recount {
                        next.recount = None;
                    }
                    next.passed = next.passed.max(closed);
                })
            }
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
            recount: None,
            decision: None,
            acknowledged: false,
            refused: false,
            cancelled: None,
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
            if self.is_cancel(at) {
                self.cancel(s, at, out);
            }
        }
        self.roll(s, out);
    }

    fn violation(&self, before: &State, s: &State) -> Option<&'static str> {
        if s.acknowledged && s.refused {
            return Some("a definite answer about a token never changes");
        }
        if s.stored && s.refused {
            return Some("a refused add never counts");
        }
        if s.stored != s.counted && s.passed >= TOKEN && s.recount.is_none() {
            return Some("the sum of a closed window is the sum of its events");
        }
        if s.recount.map_or(false, |window| window <= s.passed) {
            return Some("a recount that was requested is done");
        }
        let is_changed = s.decision != before.decision || s.cancelled != before.cancelled;
        if before.cancelled.is_some() && (s.stored || is_changed) {
            return Some(
                "a token that was cancelled stays so: it never counts, and was_counted never changes",
            );
        }
        let was_counted = match s.decision {
            Some(Decision::Cancelled(was_counted)) => was_counted,
            _ => return None,
        };
        if s.acknowledged && !was_counted || s.refused && was_counted {
            return Some("was_counted is true if the add was acknowledged, and only if it was in a count");
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
    ("a cancel waits for a recount of a window that is rolled up", |_, s| s.counted && s.recount.is_some()),
    ("a recount without the event is done", |_, s| {
        s.cancelled == Some(true) && s.recount.is_none() && s.passed >= TOKEN
    }),
    ("a resolver meets an open cancel", |m, s| {
        let resolvers = &s.requests[..REQUESTS - m.cancels];
        let waits = resolvers.iter().any(|step| matches!(step, Step::Waiting(_)));
        s.decision == Some(Decision::OpenCancel) && waits
    }),
];
