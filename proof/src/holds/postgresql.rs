//! PostgreSQL: transactions that lock, read the clock, decide and commit, and a synchronous standby.

use super::{Answer, Change, Decision, Holds, Kind, State, Step, Transaction, Work, TRANSACTIONS};
use crate::checker::Label;
use crate::rules::Rule;

impl Holds {
    pub(super) fn postgresql(&self, s: &State, out: &mut Vec<(Label, State)>) {
        self.begin(s, out);
        for at in 0..self.requests() {
            if let Step::In(slot) | Step::Decided(slot, _) = s.requests[at] {
                self.proceed(s, at, slot, out);
            }
            self.resolve(s, at, out);
        }
        self.replicate(s, out);
        let window = s.store.rolled + 1;
        if window < s.now && !(0..self.requests()).any(|at| self.is_awaited(s, at, window)) {
            self.roll(s, out);
        }
    }

    /// Whether a request takes the lock of the counter.
    fn needs_lock(&self, at: usize) -> bool {
        match self.kind(at) {
            Kind::Add => self.scenario.adds[self.subject(at)].bounded,
            Kind::Settle(_) | Kind::Release => !self.breaks(Rule::HoldEndLocks),
            Kind::Cancel => !self.breaks(Rule::HoldCancelLocks),
            _ => true,
        }
    }

    /// Whether a transaction begins without its lock; only if that is broken.
    fn locks_later(&self) -> bool {
        self.breaks(Rule::HoldCountAfterLock) || self.breaks(Rule::HoldDecisionsAfterLock)
    }

    fn is_held(&self, s: &State) -> bool {
        let is_freed = |each: &Transaction| each.flushed && self.breaks(Rule::HoldLockUntilCommit);
        s.transactions.iter().flatten().any(|each| each.locked && !is_freed(each))
    }

    /// The worker looks for expired holds; a transaction begins with its lock.
    fn begin(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let Some(slot) = s.transactions.iter().position(|each| each.is_none()) else { return };
        for at in 0..self.requests() {
            let is_first = at == 0
                || self.scenario.requests[at - 1] != self.scenario.requests[at]
                || s.requests[at - 1] != s.requests[at];
            let mut next = s.clone();
            match (s.requests[at], self.kind(at)) {
                (Step::New, Kind::Expire) => {
                    let now = self.clock(s, &s.store);
                    if s.store.holds[self.subject(at)].open.is_some_and(|until| until <= now) {
                        next.requests[at] = Step::Looked;
                        out.push((("worker", "finds an expired hold"), next));
                    }
                    continue;
                }
                (Step::New | Step::Looked, _) if is_first => {}
                _ => continue,
            }
            let locked = self.needs_lock(at) && !self.locks_later();
            if locked && self.is_held(s) {
                continue;
            }
            next.requests[at] = Step::In(slot);
            next.transactions[slot] = Some(Transaction { locked, ..Transaction::default() });
            out.push((("server", self.label(at)), next));
        }
    }

    /// Lock, clock and decisions, count, commit.
    fn proceed(&self, s: &State, at: usize, slot: usize, out: &mut Vec<(Label, State)>) {
        let Some(transaction) = s.transactions[slot] else { return };
        let mut push = |what: &'static str, step: Step, changed: Option<Transaction>| {
            let mut next = s.clone();
            next.requests[at] = step;
            next.transactions[slot] = changed;
            out.push((("transaction", what), next));
        };
        let is_locked = transaction.locked || !self.needs_lock(at);
        if !transaction.flushed {
            push("is rolled back", Step::Over, None);
        }
        if !is_locked && !self.is_held(s) {
            push("locks", s.requests[at], Some(Transaction { locked: true, ..transaction }));
        }
        let may_check = is_locked || self.locks_later();
        let may_count = is_locked || self.breaks(Rule::HoldCountAfterLock);
        match (transaction.now, transaction.change) {
            (None, _) if may_check => {
                let step = self.checked(s, at);
                let now = Some(self.end_clock(s, &s.store));
                let changed = Some(Transaction { now, ..transaction });
                push("reads the clock", step, changed.filter(|_| step == s.requests[at]));
            }
            (Some(now), None) if may_count => {
                let mut work = Work { store: s.store.clone(), wrong: s.wrong };
                let answer = self.act(&mut work, at, now);
                let change = Some(self.change(&s.store, &work.store));
                push("decides", Step::Decided(slot, answer), Some(Transaction { change, ..transaction }));
                if let Some((_, next)) = out.last_mut() {
                    next.wrong = work.wrong.or_else(|| self.outdated(s, at, answer));
                }
            }
            (_, Some(change)) if is_locked && !transaction.flushed => {
                let received = s.standby.is_none() || self.is_fast(s.requests[at], &change);
                let changed = Some(Transaction { flushed: true, received, ..transaction });
                push("begins its commit", s.requests[at], changed);
            }
            (_, Some(change)) if transaction.flushed => {
                self.show(s, at, slot, &change, transaction.received, out);
            }
            _ => {}
        }
    }

    /// Whether a transaction that writes nothing does not wait for the standby.
    fn is_fast(&self, step: Step, change: &Change) -> bool {
        let Step::Decided(_, answer) = step else { return false };
        let is_broken = match answer {
            Answer::Extended(_) => self.breaks(Rule::HoldExtensionWaits),
            Answer::Ended(_) | Answer::Held(..) => self.breaks(Rule::HoldLoserWaits),
            _ => false,
        };
        is_broken && *change == Change::default()
    }

    /// The age of the token, and whether there is a decision about it.
    fn checked(&self, s: &State, at: usize) -> Step {
        let (subject, now) = (self.subject(at), self.clock(s, &s.store));
        match self.kind(at) {
            Kind::Add if now > self.scenario.adds[subject].time => Step::Over,
            Kind::Hold
                if now > self.scenario.holds[subject].time || s.store.holds[subject].decision.is_some() =>
            {
                Step::Late
            }
            _ => s.requests[at],
        }
    }

    /// The transaction becomes visible, and its lock is free.
    fn show(
        &self,
        s: &State,
        at: usize,
        slot: usize,
        change: &Change,
        is_answered: bool,
        out: &mut Vec<(Label, State)>,
    ) {
        let mut next = s.clone();
        let wrong = self.merge(&mut next.store, change);
        next.wrong = s.wrong.or(wrong);
        next.transactions[slot] = None;
        let Step::Decided(_, answer) = s.requests[at] else { return };
        next.requests[at] = if answer == Answer::Again { Step::New } else { Step::Over };
        if is_answered {
            self.say(&mut next, at, answer);
        }
        let what = if is_answered { "ends, and answers" } else { "ends without its standby: unknown" };
        out.push((("transaction", what), next));
    }

    /// Whether the rollup of *window* waits for a request, which has read an earlier clock.
    fn is_awaited(&self, s: &State, at: usize, window: super::Time) -> bool {
        let (Step::In(slot) | Step::Decided(slot, _)) = s.requests[at] else { return false };
        let is_append = matches!(self.kind(at), Kind::Hold | Kind::Add);
        let is_seen = is_append || !self.breaks(Rule::HoldEndLocksAppends);
        let now = s.transactions[slot].and_then(|each| each.now);
        is_seen && now.is_some_and(|now| now <= window)
    }

    /// `Resolver.resolve` of a hold's token.
    fn resolve(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        if self.kind(at) != Kind::Hold {
            return;
        }
        let subject = self.subject(at);
        let held = &s.store.holds[subject];
        let mut push = |what: &'static str, step: Step, decision: Option<Decision>| {
            let mut next = s.clone();
            next.store.holds[subject].decision = decision;
            next.requests[at] = step;
            if let Step::Answering(answer, _) = step {
                next.wrong = s.wrong.or_else(|| self.outdated(s, at, answer));
            }
            out.push((("resolver", what), next));
        };
        let answering = |answer: Answer| Step::Answering(answer, s.standby.is_none());
        let known = self.decided(held).or_else(|| self.stored(held));
        let is_under_way = |other: usize| {
            let (Step::In(slot) | Step::Decided(slot, _)) = s.requests[other] else { return false };
            let is_admitted = s.transactions[slot].is_some_and(|each| each.now.is_some());
            is_admitted && self.scenario.requests[other] == self.scenario.requests[at]
        };
        match (s.requests[at], known) {
            (Step::Late, Some(answer)) => push("finds its token", answering(answer), held.decision),
            (Step::Late, None) => {
                push("notes that a decision is open", Step::Waiting, held.decision.or(Some(Decision::Open)))
            }
            (Step::Waiting, known) if !(0..self.requests()).any(is_under_way) => {
                let found = if known.is_some() { Decision::Applied } else { Decision::Void };
                let decision = match held.decision {
                    Some(Decision::Open) | None => Some(found),
                    other => other,
                };
                push("settles the decision", answering(known.unwrap_or(Answer::Void)), decision);
            }
            (Step::Answering(answer, true), _) => {
                let mut next = s.clone();
                next.requests[at] = Step::Over;
                self.say(&mut next, at, answer);
                out.push((("resolver", "answers"), next));
            }
            _ => {}
        }
    }

    /// What the standby gets, and a failover to it.
    fn replicate(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let Some(standby) = &s.standby else { return };
        let mut next = s.clone();
        let mut log = s.store.clone();
        for each in next.transactions.iter_mut().flatten().filter(|each| each.flushed) {
            each.received = true;
            self.merge(&mut log, &each.change.unwrap_or_default());
        }
        for step in &mut next.requests {
            if let Step::Answering(answer, false) = *step {
                *step = Step::Answering(answer, true);
            }
        }
        next.standby = Some(log);
        if next != *s {
            out.push((("standby", "receives the log"), next));
        }
        let mut next = State { store: standby.clone(), standby: None, ..s.clone() };
        next.transactions = [None; TRANSACTIONS];
        for step in next.requests.iter_mut().filter(|step| **step != Step::New) {
            *step = Step::Over;
        }
        out.push((("standby", "is the primary from now on"), next));
    }
}
