//! Holds over the transactional stores: SQLite's writer, and PostgreSQL's transactions under the lock
//! of the counter, with a synchronous standby.
//!
//! What `bounds` and `fence` show to be right is one step here: the count that decides is that of the
//! events, and a decision and a rollup wait for the appends under way. An instant is a window; a token
//! is late one instant after its own.
//!
//! The checks go by the events and by which holds have ended, not by the sums that decide.

mod actions;
mod postgresql;
mod scenarios;
mod sqlite;

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;
use crate::times::Time;

use scenarios::Hold;
pub use scenarios::{Scenario, SCENARIOS};

const HOLDS: usize = 2;
const ADDS: usize = 2;
const REQUESTS: usize = 7;
const TRANSACTIONS: usize = 2;

/// The count, what is held upwards, and what is held downwards.
type Counts = [i8; 3];

/// What a request asks for, about a hold or an add.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Hold,
    Settle(i8),
    Release,
    Extend,
    /// The worker's expiry.
    Expire,
    /// A cancel of the hold's token.
    Cancel,
    Add,
}

/// What is stored in the place of a token's events. A refusal has the count that decided.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Place {
    Empty,
    Accepted,
    Refused(i8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Decision {
    Open,
    Applied,
    Void,
    /// Whether it was counted.
    Cancelled(bool),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Outcome {
    Settled(i8),
    Released,
    Expired,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct End {
    outcome: Outcome,
    time: Time,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Answer {
    /// An add counts.
    Accepted,
    /// A hold is accepted: its end, or until when it is open.
    Held(Option<Outcome>, Time),
    Refused(i8),
    Void,
    Cancelled(bool),
    /// How the hold has ended, whoever ended it. For a cancel it is a refusal.
    Ended(Outcome),
    Extended(Time),
    /// There is no such hold yet.
    Absent,
    /// Nothing that a client could go by.
    Nothing,
    /// The request continues with another transaction; only if that is broken.
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Step {
    New,
    /// The worker has found the hold in the index of expired ones.
    Looked,
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

/// What is stored of a hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Held {
    place: Place,
    decision: Option<Decision>,
    /// The row of the index of open holds: when it expires.
    open: Option<Time>,
    /// The time that is reserved for its end.
    reserved: Option<Time>,
    /// The events of its end.
    end: Option<End>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Store {
    holds: [Held; HOLDS],
    adds: [Place; ADDS],
    /// The windows up to here are closed, and in the checkpoint.
    rolled: Time,
    checkpoint: Counts,
}

/// What a transaction sees and changes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Work {
    store: Store,
    wrong: Option<&'static str>,
}

/// What a transaction over PostgreSQL has changed of a hold.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct HeldChange {
    place: Option<Place>,
    decision: Option<Decision>,
    open: Option<Option<Time>>,
    reserved: Option<Time>,
    end: Option<End>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Change {
    holds: [HeldChange; HOLDS],
    adds: [Option<Place>; ADDS],
}

/// A transaction over PostgreSQL, of one request.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Transaction {
    locked: bool,
    /// The clock, which it has read under the lock of appends.
    now: Option<Time>,
    change: Option<Change>,
    flushed: bool,
    received: bool,
}

/// What clients were answered about a hold.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Said {
    hold: Option<Answer>,
    end: Option<Outcome>,
    cancel: Option<Answer>,
    /// It does not expire before.
    until: Time,
    /// There is no such hold; only if that is taken for final.
    absent: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// The store's clock, and how often it may still step back.
    now: Time,
    back: u8,
    store: Store,
    requests: [Step; REQUESTS],
    /// The transaction of SQLite's writer.
    writer: Option<Work>,
    /// PostgreSQL. No standby means that the primary need not wait for one.
    transactions: [Option<Transaction>; TRANSACTIONS],
    standby: Option<Store>,
    said: [Said; HOLDS],
    added: [Option<Answer>; ADDS],
    wrong: Option<&'static str>,
}

pub struct Holds {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

const ONCE: &str = "exactly one of settle, release and expiry happens";

fn sum(left: Counts, right: Counts) -> Counts {
    [left[0] + right[0], left[1] + right[1], left[2] + right[2]]
}

/// Note *value*; return whether another one was there.
fn is_other<T: PartialEq>(place: &mut Option<T>, value: T) -> bool {
    let is_other = place.as_ref().is_some_and(|known| *known != value);
    *place = Some(value);
    is_other
}

/// What the model and its checks share: events, sums, answers.
impl Holds {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn kind(&self, at: usize) -> Kind {
        self.scenario.requests[at].0
    }

    /// The hold or the add that a request is about.
    fn subject(&self, at: usize) -> usize {
        self.scenario.requests[at].1
    }

    fn requests(&self) -> usize {
        self.scenario.requests.len()
    }

    /// The later of the clock and the fence: its instant is in an open window.
    fn clock(&self, s: &State, store: &Store) -> Time {
        s.now.max(store.rolled + 1)
    }

    /// The clock by which holds end.
    fn end_clock(&self, s: &State, store: &Store) -> Time {
        if self.breaks(Rule::HoldEndInOpenWindow) {
            s.now
        } else {
            self.clock(s, store)
        }
    }

    /// What a hold adds to the held sums.
    fn amount(&self, hold: usize) -> Counts {
        let amount = self.scenario.holds[hold].amount;
        [0, amount.max(0), amount.min(0)]
    }

    /// Return whether the events in `(after, through]` have a clear, and their sum.
    ///
    /// A clear erases what is counted, and nothing that is held.
    fn fold(&self, store: &Store, after: Time, through: Time) -> (bool, Counts) {
        let mut events: Vec<(Time, Counts)> = Vec::new();
        for (at, held) in store.holds.iter().enumerate() {
            let amount = self.amount(at);
            if held.place == Place::Accepted {
                events.push((self.scenario.holds[at].time, amount));
            }
            if let Some(End { outcome, time }) = held.end {
                let settled = if let Outcome::Settled(amount) = outcome { amount } else { 0 };
                events.push((time, [settled, -amount[1], -amount[2]]));
            }
        }
        let adds = (0..ADDS).filter(|at| store.adds[*at] == Place::Accepted);
        let adds: Vec<_> = adds.map(|at| &self.scenario.adds[at]).collect();
        events.extend(adds.iter().map(|add| (add.time, [add.delta, 0, 0])));
        let is_in = |time: Time| after < time && time <= through;
        let clear = adds.iter().filter(|add| add.clear && is_in(add.time)).map(|add| add.time).max();
        let mut total = [0, 0, 0];
        for (time, [count, up, down]) in events.into_iter().filter(|each| is_in(each.0)) {
            let is_kept = Some(time) > clear;
            let is_held = is_kept || !self.breaks(Rule::HoldClearLeavesHeld);
            total = sum(total, [if is_kept { count } else { 0 }, 0, 0]);
            total = sum(total, if is_held { [0, up, down] } else { [0, 0, 0] });
        }
        (clear.is_some(), total)
    }

    fn after(&self, before: Counts, (is_cleared, tail): (bool, Counts)) -> Counts {
        sum(if is_cleared { [0, before[1], before[2]] } else { before }, tail)
    }

    /// The sums by the events alone.
    fn truth(&self, store: &Store) -> Counts {
        self.fold(store, 0, Time::MAX).1
    }

    /// An accurate read: checkpoint and tail.
    fn read(&self, store: &Store) -> Counts {
        self.after(store.checkpoint, self.fold(store, store.rolled, Time::MAX))
    }

    /// What is held by the holds that have no end, but for those that are expired *by* a clock.
    fn open_sum(&self, store: &Store, by: Option<Time>) -> Counts {
        let is_open = |held: &Held| held.place == Place::Accepted && held.end.is_none();
        let is_expired = |held: &Held| by.is_some_and(|now| held.open.is_some_and(|until| until <= now));
        let open = (0..HOLDS).filter(|at| is_open(&store.holds[*at]) && !is_expired(&store.holds[*at]));
        open.fold([0, 0, 0], |total, at| sum(total, self.amount(at)))
    }

    /// Answer a client, and compare with what was answered before.
    fn say(&self, s: &mut State, at: usize, answer: Answer) {
        let (kind, subject) = self.scenario.requests[at];
        if kind == Kind::Add {
            if is_other(&mut s.added[subject], answer) {
                s.wrong = s.wrong.or(Some("a token never gets two definite answers"));
            }
            return;
        }
        let said = &mut s.said[subject];
        let mut turns = false;
        match answer {
            Answer::Held(end, until) => {
                turns |= is_other(&mut said.hold, Answer::Held(None, 0));
                match end {
                    Some(end) => turns |= is_other(&mut said.end, end),
                    None => said.until = said.until.max(until),
                }
            }
            Answer::Refused(_) | Answer::Void => turns |= is_other(&mut said.hold, answer),
            Answer::Ended(end) => {
                turns |= is_other(&mut said.end, end);
                turns |= kind == Kind::Cancel && is_other(&mut said.cancel, answer);
            }
            Answer::Cancelled(was_counted) => {
                turns |= is_other(&mut said.cancel, answer);
                turns |= was_counted && is_other(&mut said.end, Outcome::Released);
            }
            Answer::Extended(until) => {
                turns |= is_other(&mut said.hold, Answer::Held(None, 0));
                said.until = said.until.max(until);
            }
            Answer::Absent => said.absent |= self.breaks(Rule::HoldAbsentNotFinal),
            Answer::Accepted | Answer::Nothing | Answer::Again => {}
        }
        if turns {
            let wrong = "no definite answer turns: every retry and every loser gets the winner's end";
            s.wrong = s.wrong.or(Some(wrong));
        }
    }

    /// Return what is wrong with an *answer* that is given from here on.
    fn outdated(&self, s: &State, at: usize, answer: Answer) -> Option<&'static str> {
        let is_open = self.kind(at) == Kind::Hold && matches!(answer, Answer::Held(None, _));
        let is_ended = is_open && s.said[self.subject(at)].end.is_some();
        is_ended.then_some("a retry of a hold says that it has ended, if that was answered before")
    }

    /// The worker moves the next window into the checkpoint.
    fn roll(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let store = &mut next.store;
        let window = store.rolled + 1;
        store.checkpoint = self.after(store.checkpoint, self.fold(&s.store, s.store.rolled, window));
        store.rolled = window;
        out.push((("worker", "moves a window into the checkpoint"), next));
    }
}

impl Model for Holds {
    type State = State;

    const SITUATIONS: &'static [Situation<Holds>] = SITUATIONS;

    fn initial(&self) -> State {
        let held = Held { place: Place::Empty, decision: None, open: None, reserved: None, end: None };
        let store =
            Store { holds: [held; HOLDS], adds: [Place::Empty; ADDS], rolled: 0, checkpoint: [0, 0, 0] };
        State {
            now: 1,
            back: self.scenario.back,
            standby: self.scenario.failover.then(|| store.clone()),
            store,
            requests: [Step::New; REQUESTS],
            writer: None,
            transactions: [None; TRANSACTIONS],
            said: [Said::default(); HOLDS],
            added: [None; ADDS],
            wrong: None,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < self.scenario.horizon {
            out.push((("time", "passes"), State { now: s.now + 1, ..s.clone() }));
        }
        if s.now > 1 && s.back > 0 {
            out.push((("clock", "steps back"), State { now: s.now - 1, back: s.back - 1, ..s.clone() }));
        }
        if self.breaks(Rule::HoldReservationKept) {
            for hold in (0..HOLDS).filter(|hold| s.store.holds[*hold].reserved.is_some()) {
                let mut next = s.clone();
                next.store.holds[hold].reserved = None;
                out.push((("worker", "forgets a reserved time"), next));
            }
        }
        if self.scenario.postgresql {
            self.postgresql(s, out);
        } else {
            self.sqlite(s, out);
        }
        // Requests for the same are interchangeable.
        for (_, state) in out {
            let mut from = 0;
            for at in 1..=self.requests() {
                if at == self.requests() || self.scenario.requests[at] != self.scenario.requests[from] {
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
        let (truth, open) = (self.truth(&s.store), self.open_sum(&s.store, None));
        if truth[1..] != open[1..] {
            return Some("the held sum is the sum of the open holds");
        }
        if self.read(&s.store) != truth {
            return Some("an accurate read is the sum of the events: no end is late");
        }
        let is_open = |held: &Held| held.place == Place::Accepted && held.end.is_none();
        if s.store.holds.iter().any(|held| held.open.is_some() != is_open(held)) {
            return Some("the index has the holds that are open");
        }
        if s.store.checkpoint[1] < 0 || s.store.checkpoint[2] > 0 {
            return Some("a held sum as of a window is that of holds that were accepted by then");
        }
        (0..HOLDS).find_map(|hold| self.contradiction(s, hold)).or_else(|| self.overrun(s))
    }
}

/// What must hold after every commit.
impl Holds {
    /// Whether what clients were answered is not what is stored.
    fn contradiction(&self, s: &State, hold: usize) -> Option<&'static str> {
        let (held, said) = (&s.store.holds[hold], &s.said[hold]);
        let end = held.end.map(|end| end.outcome);
        let is_cancelled = matches!(held.decision, Some(Decision::Cancelled(_)));
        if said.end.is_some() && said.end != end {
            return Some("an end that was answered stays");
        }
        if let Some(Answer::Cancelled(was_counted)) = said.cancel {
            let is_gone = held.place == Place::Empty && is_cancelled && !was_counted;
            if !is_gone && end != Some(Outcome::Released) {
                return Some("a hold whose token was cancelled is released, or never there");
            }
        }
        let is_stored = match said.hold {
            Some(Answer::Held(..)) => held.place == Place::Accepted,
            Some(Answer::Refused(count)) => held.place == Place::Refused(count) || is_cancelled,
            Some(Answer::Void) => held.place == Place::Empty && held.decision.is_some(),
            _ => true,
        };
        if !is_stored {
            return Some("what was answered stays: a hold is there, a refusal is kept");
        }
        if said.absent && held.place == Place::Accepted {
            return Some("no definite answer turns: a hold that is absent never comes");
        }
        let is_early = held.end.is_some_and(|end| end.outcome == Outcome::Expired && end.time < said.until);
        (is_early || held.open.is_some_and(|until| until < said.until))
            .then_some("a hold does not expire before the time that was answered")
    }

    /// Whether the count with the open holds is past a bound although every change keeps it.
    fn overrun(&self, s: &State) -> Option<&'static str> {
        if !self.scenario.is_alone() {
            return None;
        }
        let mut over: Counts = [0, 0, 0];
        for (at, held) in s.store.holds.iter().enumerate() {
            let amount = self.scenario.holds[at].amount;
            if let Some(End { outcome: Outcome::Settled(settled), .. }) = held.end {
                over[1] += if amount > 0 { (settled - amount).max(0) } else { 0 };
                over[2] += if amount < 0 { (settled - amount).min(0) } else { 0 };
            }
        }
        let (count, open) = (self.truth(&s.store)[0], self.open_sum(&s.store, None));
        let is_past =
            count + open[1] - over[1] > self.scenario.most || count + open[2] - over[2] < self.scenario.least;
        is_past.then_some("the count with what is held keeps its bounds, but for a settle of more than that")
    }
}

/// Whether a request is about to get this answer.
fn is_decided(m: &Holds, s: &State, is_asked: fn(Kind) -> bool, answer: Answer) -> bool {
    let decided = |at: &usize| matches!(s.requests[*at], Step::Decided(_, known) if known == answer);
    (0..m.requests()).filter(decided).any(|at| is_asked(m.kind(at)))
}

fn has_end(s: &State, hold: usize, outcome: Outcome) -> bool {
    s.store.holds[hold].end.is_some_and(|end| end.outcome == outcome)
}

const SITUATIONS: &[Situation<Holds>] = &[
    ("a hold is refused", |_, s| matches!(s.said[0].hold, Some(Answer::Refused(_)))),
    ("a late hold is void", |_, s| s.said[0].hold == Some(Answer::Void)),
    ("a settle finds that its hold has expired", |m, s| {
        is_decided(m, s, |kind| matches!(kind, Kind::Settle(_)), Answer::Ended(Outcome::Expired))
    }),
    ("a release finds that its hold is settled", |m, s| {
        is_decided(m, s, |kind| kind == Kind::Release, Answer::Ended(Outcome::Settled(1)))
    }),
    ("an extension finds that its hold has expired", |m, s| {
        is_decided(m, s, |kind| kind == Kind::Extend, Answer::Ended(Outcome::Expired))
    }),
    ("a retry of a hold finds that it has ended", |m, s| {
        let ends = [Outcome::Settled(1), Outcome::Released, Outcome::Expired];
        ends.iter().any(|end| is_decided(m, s, |kind| kind == Kind::Hold, Answer::Held(Some(*end), 0)))
    }),
    ("an add takes the room of an expired hold", |m, s| {
        let is_taken = m.scenario.adds[0].bounded && s.added[0] == Some(Answer::Accepted);
        is_taken && has_end(s, 0, Outcome::Expired)
    }),
    ("a hold takes the room of another one", |_, s| {
        has_end(s, 0, Outcome::Expired) && matches!(s.said[1].hold, Some(Answer::Held(..)))
    }),
    ("a worker finds that a hold was extended", |m, s| {
        let is_extended = s.store.holds[0].open.is_some_and(|until| until > s.now);
        is_extended && (0..m.requests()).any(|at| s.requests[at] == Step::Looked)
    }),
    ("a hold is settled after its first time", |m, s| {
        let Hold { time, lasts, .. } = m.scenario.holds[0];
        s.store.holds[0].end.is_some_and(|end| {
            matches!(end.outcome, Outcome::Settled(_)) && end.time > time + lasts && s.said[0].end.is_some()
        })
    }),
    ("a hold has expired, and the clock is before that", |_, s| {
        s.store.holds[0].end.is_some_and(|end| end.outcome == Outcome::Expired && end.time > s.now)
    }),
    ("more than was held is settled", |_, s| s.said[0].end == Some(Outcome::Settled(2))),
    ("a hold that is open keeps an add of the other sign", |m, s| {
        let is_refused = matches!(s.added[0], Some(Answer::Refused(_)));
        is_refused && m.scenario.adds[0].delta < 0 && m.open_sum(&s.store, None)[1] > 0
    }),
    ("a settle counts after a clear", |m, s| {
        m.scenario.adds[1].clear
            && s.store.adds[1] == Place::Accepted
            && has_end(s, 0, Outcome::Settled(1))
            && m.truth(&s.store)[0] > 0
    }),
    ("a settle begins after a clear of a later time, which erases it", |m, s| {
        let is_cleared = m.scenario.adds[1].clear && s.store.adds[1] == Place::Accepted;
        let is_settle = |kind| matches!(kind, Kind::Settle(_));
        let is_settled = is_decided(m, s, is_settle, Answer::Ended(Outcome::Settled(1)));
        is_cleared && is_settled && m.clock(s, &s.store) <= m.scenario.adds[1].time
    }),
    ("a cancel comes before its hold", |_, s| s.said[0].cancel == Some(Answer::Cancelled(false))),
    ("a cancel releases a hold", |_, s| s.said[0].cancel == Some(Answer::Cancelled(true))),
    ("a cancel finds that its hold is settled", |_, s| {
        s.said[0].cancel == Some(Answer::Ended(Outcome::Settled(1)))
    }),
    ("a hold of a later time has ended already", |m, s| {
        s.store.holds[1].end.is_some() && s.now < m.scenario.holds[1].time
    }),
    ("a failover loses an end that was not acknowledged", |m, s| {
        let is_over = |at: usize| s.requests[at] == Step::Over && matches!(m.kind(at), Kind::Settle(_));
        let is_lost = matches!(s.said[0].hold, Some(Answer::Held(..))) && s.store.holds[0].end.is_none();
        m.scenario.failover && s.standby.is_none() && is_lost && (0..m.requests()).any(is_over)
    }),
    ("a failover keeps an end that was not acknowledged", |m, s| {
        let is_kept = s.said[0].end.is_none() && s.store.holds[0].end.is_some();
        m.scenario.failover && s.standby.is_none() && is_kept
    }),
];
