//! Bounded adds over the transactional stores: SQLite's writer, whose commit may report an error
//! although it is on disk, and PostgreSQL's `append` under locks, with a synchronous standby.
//!
//! What `fence` shows to be right is one step here: a decision, a cancel and a rollup wait for the
//! appends of their tokens. An instant is a window; a token is late one instant after its own.
//!
//! Whether an add was right is checked against the events that are committed before it, so that no
//! mistake of the counts that it was decided by is shared with the check.

mod postgresql;
mod sqlite;

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;
use crate::times::Time;

const TOKENS: usize = 3;
const REQUESTS: usize = 6;
const TRANSACTIONS: usize = 2;
/// The bound of the namespace, while it has one.
const NAMESPACE_MOST: i8 = 1;
const LAST: Time = 3;

/// A number for each of two counters.
type Counts = [i8; 2];

pub struct Token {
    time: Time,
    delta: Counts,
    most: Option<i8>,
    least: Option<i8>,
    clear: bool,
}

const PLAIN: Token = Token { time: 1, delta: [1, 0], most: None, least: None, clear: false };
/// Takes the only room.
const TAKE: Token = Token { most: Some(1), ..PLAIN };
/// Takes back what there is.
const GIVE: Token = Token { delta: [-1, 0], least: Some(0), ..PLAIN };
const CLEAR: Token = Token { time: 2, delta: [0, 0], clear: true, ..PLAIN };
/// Its bound is above what it brings after a cancel.
const UP: Token = Token { time: 2, least: Some(1), ..PLAIN };
/// Takes back what an earlier window has.
const GIVE_LATER: Token = Token { time: 2, ..GIVE };
/// An atomic add to both counters.
const BOTH: Token = Token { delta: [1, 1], ..TAKE };
const SECOND: Token = Token { delta: [0, 1], ..TAKE };

pub struct Scenario {
    pub name: &'static str,
    pub quick: bool,
    postgresql: bool,
    tokens: [Token; TOKENS],
    /// The token of each add, and of each cancel, in order.
    adds: &'static [usize],
    cancels: &'static [usize],
    /// The namespace gets a bound, and loses it.
    namespace: bool,
    failover: bool,
    horizon: Time,
}

const SQLITE: Scenario = Scenario {
    name: "bounds, SQLite",
    quick: true,
    postgresql: false,
    tokens: [TAKE, TAKE, GIVE],
    adds: &[0, 0, 1, 1, 2],
    cancels: &[],
    namespace: false,
    failover: false,
    horizon: 2,
};

const POSTGRESQL: Scenario =
    Scenario { name: "bounds, PostgreSQL", postgresql: true, adds: &[0, 0, 1, 1], failover: true, ..SQLITE };

pub const SCENARIOS: &[Scenario] = &[
    SQLITE,
    Scenario { name: "bounds, SQLite, cancel", adds: &[0, 0, 1, 1], cancels: &[0, 1], ..SQLITE },
    Scenario {
        name: "bounds, SQLite, down",
        tokens: [PLAIN, GIVE_LATER, UP],
        adds: &[0, 1, 1, 2],
        cancels: &[0],
        horizon: 3,
        ..SQLITE
    },
    Scenario {
        name: "bounds, SQLite, clear",
        tokens: [TAKE, CLEAR, Token { time: 3, ..TAKE }],
        adds: &[0, 0, 1, 2, 2],
        cancels: &[1],
        horizon: 4,
        ..SQLITE
    },
    Scenario {
        name: "bounds, SQLite, namespace",
        tokens: [PLAIN, PLAIN, Token { delta: [-1, 0], ..PLAIN }],
        namespace: true,
        ..SQLITE
    },
    POSTGRESQL,
    Scenario {
        name: "bounds, PostgreSQL, cancel",
        adds: &[0, 1, 1],
        cancels: &[0, 1],
        failover: false,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, down",
        quick: false,
        tokens: [PLAIN, GIVE_LATER, UP],
        adds: &[0, 1, 1, 2],
        cancels: &[0],
        failover: false,
        horizon: 3,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, clear",
        quick: false,
        tokens: [TAKE, CLEAR, Token { time: 3, ..TAKE }],
        adds: &[0, 0, 1, 2],
        failover: false,
        horizon: 4,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, namespace",
        tokens: [PLAIN, PLAIN, Token { delta: [2, 0], ..PLAIN }],
        adds: &[0, 0, 1, 1],
        namespace: true,
        failover: false,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, atomic",
        tokens: [BOTH, SECOND, BOTH],
        adds: &[0, 0, 1, 2],
        failover: false,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, more",
        quick: false,
        adds: &[0, 0, 1, 1, 2],
        cancels: &[0],
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, failover and clear",
        quick: false,
        tokens: [TAKE, CLEAR, Token { time: 3, ..TAKE }],
        adds: &[0, 1, 2, 2],
        cancels: &[1],
        horizon: 4,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, failover, down",
        quick: false,
        tokens: [PLAIN, GIVE_LATER, UP],
        adds: &[0, 1, 1, 2],
        cancels: &[0],
        horizon: 3,
        ..POSTGRESQL
    },
    Scenario {
        name: "bounds, PostgreSQL, failover, atomic",
        quick: false,
        tokens: [BOTH, SECOND, BOTH],
        adds: &[0, 0, 1, 2],
        cancels: &[0],
        ..POSTGRESQL
    },
];

/// What is stored in the place of a token's event. A refusal has the count that decided.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Place {
    Empty,
    Accepted,
    Refused(i8),
    /// One item of an atomic add is refused; only if that is broken.
    Half,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Decision {
    Open,
    /// A cancel is open, and whether the decision before was applied.
    OpenCancel(bool),
    Applied,
    Void,
    /// Whether it was counted.
    Cancelled(bool),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Answer {
    Accepted,
    Refused(i8),
    Void,
    Cancelled(bool),
    Conflict,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    New,
    /// In this transaction.
    In(usize),
    Decided(usize, Answer),
    /// The append refuses its token: it is resolved.
    Late,
    /// The decision is open; it waits for appends.
    Waiting,
    /// It has an answer, whose commit the standby has or not.
    Answering(Answer, bool),
    Over,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Store {
    places: [Place; TOKENS],
    /// The terms of this place have the namespace's bound; only if that is broken.
    of_namespace: [bool; TOKENS],
    decisions: [Option<Decision>; TOKENS],
    /// The windows up to here are in the checkpoint.
    rolled: Time,
    checkpoint: Counts,
    /// A recount of a window that is rolled up.
    pending: bool,
}

/// The transaction of SQLite's writer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Writer {
    work: Store,
    /// What it adds to the live tail.
    running: Counts,
    /// It has a clear, or removes one: the log must be read.
    cleared: bool,
    wrong: Option<&'static str>,
}

/// A transaction over PostgreSQL, of one statement with one or two adds.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug)]
pub struct Transaction {
    /// Whether its copy of the directory has the namespace's bound.
    knows_bound: bool,
    /// It holds the lock of appends, and its tokens are in time.
    checked: bool,
    locks: [bool; 2],
    /// A checkpoint that an earlier statement has read; only if that is broken.
    head: Option<Counts>,
    written: Option<[Place; TOKENS]>,
    flushed: bool,
    received: bool,
    /// A commit that takes no lock, such as a cancel, came after the count was read.
    disturbed: bool,
}

/// The namespace's bound: whether copies of the directory have it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bound {
    Unset,
    Announced,
    InForce,
    Removed,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    bound: Bound,
    store: Store,
    requests: [Step; REQUESTS],
    /// SQLite.
    writer: Option<Writer>,
    tail: Option<Counts>,
    /// PostgreSQL. No standby means that the primary need not wait for one.
    transactions: [Option<Transaction>; TRANSACTIONS],
    standby: Option<Store>,
    /// What clients were answered.
    said: [Option<Answer>; TOKENS],
    cancelled: [Option<bool>; TOKENS],
    wrong: Option<&'static str>,
}

pub struct Bounds {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

fn sum(left: Counts, right: Counts) -> Counts {
    [left[0] + right[0], left[1] + right[1]]
}

fn difference(left: Counts, right: Counts) -> Counts {
    [left[0] - right[0], left[1] - right[1]]
}

impl Place {
    fn is_accepted(self) -> bool {
        matches!(self, Place::Accepted | Place::Half)
    }
}

impl Store {
    fn answer(&self, token: usize) -> Option<Answer> {
        match self.places[token] {
            Place::Empty => None,
            Place::Accepted | Place::Half => Some(Answer::Accepted),
            Place::Refused(count) => Some(Answer::Refused(count)),
        }
    }
}

/// What the model and its checks share: counts, bounds, tokens.
impl Bounds {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn token_of(&self, at: usize) -> usize {
        let adds = self.scenario.adds;
        if at < adds.len() {
            adds[at]
        } else {
            self.scenario.cancels[at - adds.len()]
        }
    }

    fn requests(&self) -> usize {
        self.scenario.adds.len() + self.scenario.cancels.len()
    }

    fn is_cancel(&self, at: usize) -> bool {
        at >= self.scenario.adds.len()
    }

    fn is_late(&self, s: &State, token: usize) -> bool {
        s.now > self.scenario.tokens[token].time
    }

    fn counts(&self, token: usize, place: Place) -> Counts {
        let delta = self.scenario.tokens[token].delta;
        match place {
            Place::Accepted => delta,
            Place::Half => [delta[0], 0],
            _ => [0, 0],
        }
    }

    /// Return whether the events in `(after, LAST]` or, with *head*, in `(0, after]` have a clear,
    /// and the sum of those after it.
    fn fold(&self, store: &Store, after: Time, head: bool) -> (bool, Counts) {
        let tokens = &self.scenario.tokens;
        let is_in = |at: &usize| (tokens[*at].time > after) != head && store.places[*at] != Place::Empty;
        let clears = (0..TOKENS).filter(is_in).filter(|at| tokens[*at].clear);
        let clear = clears.map(|at| tokens[at].time).max();
        let kept = (0..TOKENS).filter(is_in).filter(|at| Some(tokens[*at].time) > clear);
        let total = kept.fold([0, 0], |total, at| sum(total, self.counts(at, store.places[at])));
        (clear.is_some(), total)
    }

    /// The count by the events alone.
    fn truth(&self, store: &Store) -> Counts {
        self.fold(store, 0, false).1
    }

    /// An accurate read: checkpoint, pending recounts and tail, of one snapshot.
    fn read(&self, store: &Store) -> Counts {
        if store.pending {
            return self.truth(store);
        }
        self.stored(store, store.checkpoint)
    }

    /// The count by a checkpoint and the tail.
    fn stored(&self, store: &Store, checkpoint: Counts) -> Counts {
        match self.fold(store, store.rolled, false) {
            (true, tail) => tail,
            (false, tail) => sum(checkpoint, tail),
        }
    }

    /// What an add is decided by, if the store is read: an accurate read.
    fn deciding(&self, store: &Store, head: Option<Counts>) -> Counts {
        let count = match head {
            Some(head) => self.stored(store, head),
            None if self.breaks(Rule::BoundPendingCounts) => self.stored(store, store.checkpoint),
            None => self.read(store),
        };
        sum(count, self.kept_room(store))
    }

    fn is_erased(&self, store: &Store, token: usize) -> bool {
        let tokens = &self.scenario.tokens;
        let clears = (0..TOKENS).filter(|at| tokens[*at].clear && store.places[*at] == Place::Accepted);
        clears.clone().any(|at| tokens[at].time >= tokens[token].time && at != token)
    }

    fn is_bounded(&self, token: usize, knows_bound: bool) -> bool {
        let token = &self.scenario.tokens[token];
        !token.clear && (token.most.is_some() || token.least.is_some() || knows_bound)
    }

    /// Return a counter whose count *after* is past a bound of *token*, and further than *before*.
    fn past(&self, token: usize, of_namespace: bool, before: Counts, after: Counts) -> Option<usize> {
        let Token { most, least, clear, .. } = self.scenario.tokens[token];
        let namespace = of_namespace.then_some(NAMESPACE_MOST);
        let is_past = |at: usize| {
            let above = most.into_iter().chain(namespace).any(|most| after[at] > most);
            let below = least.is_some_and(|least| after[at] < least);
            above && after[at] > before[at] || below && after[at] < before[at]
        };
        if clear {
            return None;
        }
        (0..2).find(|at| is_past(*at))
    }

    /// Decide about *token*, of which nothing is stored, by the *count* before it.
    fn decide(&self, store: &Store, token: usize, of_namespace: bool, count: Counts) -> Place {
        let delta = self.scenario.tokens[token].delta;
        let is_erased = self.is_erased(store, token) && !self.breaks(Rule::BoundErasedAllowed);
        let after = if is_erased { count } else { sum(count, delta) };
        let mut past = self.past(token, of_namespace, count, after);
        if self.breaks(Rule::BoundTowardsAllowed) && self.is_bounded(token, of_namespace) {
            let low = after.map(|_| i8::MIN);
            let high = after.map(|_| i8::MAX);
            past = past.or(self.past(token, of_namespace, low, after));
            past = past.or(self.past(token, of_namespace, high, after));
        }
        match past {
            None => Place::Accepted,
            Some(1) if delta[0] != 0 && self.breaks(Rule::BoundAtomicWhole) => Place::Half,
            Some(at) => Place::Refused(count[at]),
        }
    }

    /// Return the promise that is broken if *token* is stored as *place* after what is in *store*.
    ///
    /// *seen* is whether it was decided by the namespace's bound, *is_kept* whether it must be.
    fn verify(
        &self,
        store: &Store,
        token: usize,
        place: Place,
        seen: bool,
        is_kept: bool,
    ) -> Option<&'static str> {
        let before = self.truth(store);
        let mut accepted = store.clone();
        accepted.places[token] = Place::Accepted;
        let after = self.truth(&accepted);
        match place {
            Place::Half => Some("an atomic add counts completely or not at all"),
            Place::Accepted if self.past(token, is_kept, before, after).is_some() => {
                Some("an accepted add never brings the count further past a bound")
            }
            Place::Refused(count) => match self.past(token, seen, before, after) {
                None => Some("an add is refused only if it would bring the count further past a bound"),
                Some(at) if before[at] != count => Some("a refusal has the count that decided"),
                Some(_) => None,
            },
            _ => None,
        }
    }

    /// Answer a client, and compare with what was answered before.
    fn say(&self, s: &mut State, token: usize, answer: Answer) {
        let known = s.said[token];
        let is_other = match answer {
            Answer::Cancelled(was_counted) => s.cancelled[token].is_some_and(|known| known != was_counted),
            _ => known.is_some_and(|known| known != answer),
        };
        if answer == Answer::Conflict {
            s.wrong = Some("a retry with the same payload is never a conflict");
        } else if is_other {
            s.wrong = Some("a token never gets two definite answers");
        }
        match answer {
            Answer::Cancelled(was_counted) => s.cancelled[token] = Some(was_counted),
            _ => s.said[token] = Some(answer),
        }
    }

    /// The answer of what is stored: of the same payload, whatever the namespace's bound is now.
    fn replay(&self, store: &Store, token: usize, knows_bound: bool) -> Option<Answer> {
        let answer = store.answer(token)?;
        if self.breaks(Rule::BoundTermsCompared) && matches!(answer, Answer::Refused(_)) {
            return Some(Answer::Conflict);
        }
        let is_other = store.of_namespace[token] != knows_bound;
        Some(if self.breaks(Rule::BoundOfNamespaceApart) && is_other { Answer::Conflict } else { answer })
    }

    /// What a resolver finds of a late token.
    fn found(&self, store: &Store, token: usize) -> Option<Answer> {
        match store.places[token] {
            Place::Refused(_) if self.breaks(Rule::BoundRefusalFound) => None,
            Place::Refused(_) if self.breaks(Rule::BoundRefusalAdopted) => Some(Answer::Accepted),
            Place::Refused(_)
                if self.breaks(Rule::BoundAppliedLooked)
                    && store.decisions[token] == Some(Decision::Applied) =>
            {
                Some(Answer::Accepted)
            }
            _ => store.answer(token),
        }
    }

    /// A cancel removes what is stored of *token*, and is settled.
    fn remove(&self, store: &mut Store, token: usize, was_applied: bool) -> bool {
        let was_counted = match store.places[token] {
            Place::Refused(_) if self.breaks(Rule::BoundRefusalUncounted) => true,
            Place::Refused(_) if self.breaks(Rule::BoundCancelByEvent) => was_applied,
            _ => store.places[token].is_accepted(),
        };
        store.pending |=
            store.places[token].is_accepted() && self.scenario.tokens[token].time <= store.rolled;
        store.places[token] = Place::Empty;
        store.decisions[token] = Some(Decision::Cancelled(was_counted));
        was_counted
    }

    /// What a broken cancel leaves of the room that it should give back.
    fn kept_room(&self, store: &Store) -> Counts {
        let mut kept = [0, 0];
        for token in 0..TOKENS {
            let is_removed = store.decisions[token] == Some(Decision::Cancelled(true));
            if is_removed && self.breaks(Rule::BoundCancelGivesRoom) {
                kept = sum(kept, self.scenario.tokens[token].delta);
            }
        }
        kept
    }

    fn check_point(&self, store: &mut Store) {
        store.checkpoint = self.fold(store, store.rolled, true).1;
        store.pending = false;
    }
}

impl Model for Bounds {
    type State = State;

    const SITUATIONS: &'static [Situation<Bounds>] = SITUATIONS;

    fn initial(&self) -> State {
        let store = Store {
            places: [Place::Empty; TOKENS],
            of_namespace: [false; TOKENS],
            decisions: [None; TOKENS],
            rolled: 0,
            checkpoint: [0, 0],
            pending: false,
        };
        let standby = (self.scenario.postgresql && self.scenario.failover).then(|| store.clone());
        State {
            now: 1,
            bound: Bound::Unset,
            store,
            requests: [Step::New; REQUESTS],
            writer: None,
            tail: Some([0, 0]),
            transactions: [None, None],
            standby,
            said: [None; TOKENS],
            cancelled: [None; TOKENS],
            wrong: None,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < self.scenario.horizon {
            out.push((("time", "passes"), State { now: s.now + 1, ..s.clone() }));
        }
        self.change_bound(s, out);
        if self.scenario.postgresql {
            self.postgresql(s, out);
        } else {
            self.sqlite(s, out);
        }
        // Requests of one token are interchangeable.
        for (_, state) in out {
            let (mut from, adds) = (0, self.scenario.adds.len());
            for at in 1..=self.requests() {
                let is_end = at == self.requests() || at == adds;
                if is_end || self.token_of(at) != self.token_of(from) {
                    state.requests[from..at].sort_unstable();
                    from = at;
                }
            }
        }
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.wrong.is_some() {
            return s.wrong;
        }
        if self.read(&s.store) != self.truth(&s.store) {
            return Some("an accurate read is the sum of the events");
        }
        if (0..TRANSACTIONS).all(|slot| self.is_blocked(s, slot)) {
            return Some("no two appends wait for each other's locks");
        }
        (0..TOKENS).find_map(|token| self.contradiction(s, token)).or_else(|| self.overrun(s))
    }
}

impl Bounds {
    /// The namespace gets a bound. It is in force when every copy of the directory has it, and the
    /// appends that did not have it have ended. Later it is removed.
    fn change_bound(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if !self.scenario.namespace || s.writer.is_some() {
            return;
        }
        let is_without = |each: &Transaction| !each.knows_bound;
        let is_awaited = s.transactions.iter().flatten().any(is_without);
        let next = match s.bound {
            Bound::Unset => Bound::Announced,
            Bound::Announced if is_awaited && !self.breaks(Rule::BoundAwaitsAppends) => return,
            Bound::Announced => Bound::InForce,
            Bound::InForce => Bound::Removed,
            Bound::Removed => return,
        };
        let what = match next {
            Bound::Announced => "gets a bound",
            Bound::InForce => "has its bound in force",
            _ => "has no bound any more",
        };
        out.push((("namespace", what), State { bound: next, ..s.clone() }));
    }

    /// Whether what a client was answered is not what is stored.
    fn contradiction(&self, s: &State, token: usize) -> Option<&'static str> {
        let (place, decision) = (s.store.places[token], s.store.decisions[token]);
        let is_cancelled = matches!(decision, Some(Decision::Cancelled(_)));
        if let Some(was_counted) = s.cancelled[token] {
            if place != Place::Empty || decision != Some(Decision::Cancelled(was_counted)) {
                return Some("a token that was cancelled stays so");
            }
            if s.said[token].is_some_and(|said| (said == Answer::Accepted) != was_counted) {
                return Some("was_counted is true for an accepted add, and false for a refused or void one");
            }
        }
        let is_stored = match s.said[token] {
            Some(Answer::Accepted) => place.is_accepted(),
            Some(Answer::Refused(count)) => place == Place::Refused(count),
            Some(Answer::Void) => place == Place::Empty && decision.is_some(),
            _ => true,
        };
        (!is_stored && !is_cancelled)
            .then_some("what was answered stays: an accepted add counts, a refusal is kept")
    }

    /// Whether the count is past a bound although every change keeps it.
    fn overrun(&self, s: &State) -> Option<&'static str> {
        let Scenario { tokens, cancels, namespace, .. } = self.scenario;
        let is_alone = tokens.iter().enumerate().all(|(at, each)| self.is_bounded(at, false) && !each.clear);
        if !is_alone || !cancels.is_empty() || *namespace {
            return None;
        }
        let counts = self.truth(&s.store);
        let is_past = tokens.iter().any(|token| {
            let above = token.most.is_some_and(|most| counts.iter().any(|count| *count > most));
            above || token.least.is_some_and(|least| counts.iter().any(|count| *count < least))
        });
        is_past.then_some("with bounded adds alone no accurate read passes a bound")
    }
}

const SITUATIONS: &[Situation<Bounds>] = &[
    ("a refusal is kept although there is room", |m, s| {
        let room = |at: usize| m.scenario.tokens[at].most.is_some_and(|most| m.truth(&s.store)[0] < most);
        (0..TOKENS).any(|at| matches!(s.store.places[at], Place::Refused(_)) && room(at))
    }),
    ("a retry finds a refusal", |m, s| {
        let refused = |at: usize| matches!(s.requests[at], Step::Decided(_, Answer::Refused(_)));
        (0..m.requests()).any(|at| refused(at) && matches!(s.said[m.token_of(at)], Some(Answer::Refused(_))))
    }),
    ("a refusal is cancelled", |m, s| {
        let was_refused = |at: usize| matches!(s.said[at], Some(Answer::Refused(_)));
        !m.scenario.cancels.is_empty() && (0..TOKENS).any(|at| was_refused(at) && s.cancelled[at].is_some())
    }),
    ("an add takes the room that a cancel gave back", |m, s| {
        let is_taken = |at: usize| m.scenario.adds.contains(&at) && s.said[at] == Some(Answer::Accepted);
        s.cancelled.contains(&Some(true)) && (0..TOKENS).any(|at| is_taken(at) && s.cancelled[at].is_none())
    }),
    ("a late token is void", |_, s| s.said.contains(&Some(Answer::Void))),
    ("an accepted add is in the checkpoint, and another one is refused", |_, s| {
        let refused = |place: &Place| matches!(place, Place::Refused(_));
        s.store.checkpoint[0] == 1 && s.store.places.iter().any(refused)
    }),
    ("an add is decided beside a pending recount", |_, s| {
        let works = |each: &Writer| {
            each.work.pending && s.requests.iter().any(|step| matches!(step, Step::Decided(..)))
        };
        s.writer.as_ref().is_some_and(works)
    }),
    ("a failover loses an event that was not acknowledged", |m, s| {
        m.scenario.failover
            && s.standby.is_none()
            && s.store.places[0] == Place::Empty
            && s.requests[0] == Step::Over
    }),
    ("a failover keeps an event that was not acknowledged", |m, s| {
        m.scenario.failover
            && s.standby.is_none()
            && s.store.places[0] == Place::Accepted
            && s.said[0].is_none()
    }),
    ("an append waits for the lock of another one", |m, s| {
        (0..TRANSACTIONS).any(|slot| m.is_blocked(s, slot))
    }),
    ("the count is past a bound, and an add towards it is accepted", |m, s| {
        let is_accepted = |at: usize| {
            let least = m.scenario.tokens[m.token_of(at)].least;
            least == Some(1) && matches!(s.requests[at], Step::Decided(_, Answer::Accepted))
        };
        m.truth(&s.store)[0] < 0 && (0..m.requests()).any(is_accepted)
    }),
    ("an atomic add is refused", |m, s| {
        m.scenario.tokens[0].delta == [1, 1] && matches!(s.said[0], Some(Answer::Refused(_)))
    }),
];
