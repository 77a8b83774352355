//! PostgreSQL: transactions that lock, count and commit, and a synchronous standby.

use super::{Answer, Bound, Bounds, Decision, Place, State, Step, Transaction};
use super::{TOKENS, TRANSACTIONS};
use crate::checker::Label;
use crate::rules::Rule;

impl Bounds {
    pub(super) fn postgresql(&self, s: &State, out: &mut Vec<(Label, State)>) {
        self.begin(s, out);
        for slot in 0..TRANSACTIONS {
            if let Some(transaction) = &s.transactions[slot] {
                self.append(s, slot, transaction, out);
            }
        }
        for at in 0..self.requests() {
            self.resolve(s, at, out);
        }
        self.replicate(s, out);
        self.roll(s, out);
    }

    /// A statement with one or two adds begins.
    fn begin(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let Some(slot) = s.transactions.iter().position(|each| each.is_none()) else { return };
        let copies: &[bool] = match s.bound {
            Bound::Unset => &[false],
            Bound::Announced | Bound::Removed => &[false, true],
            Bound::InForce => &[true],
        };
        let adds = self.scenario.adds.len();
        let is_first = |at: usize| {
            at == 0 || self.token_of(at - 1) != self.token_of(at) || s.requests[at - 1] != Step::New
        };
        let new = || (0..adds).filter(|at| s.requests[*at] == Step::New);
        for first in new().filter(|at| is_first(*at)) {
            for second in new().filter(|at| *at >= first) {
                for knows_bound in copies {
                    let mut next = s.clone();
                    next.requests[first] = Step::In(slot);
                    next.requests[second] = Step::In(slot);
                    next.transactions[slot] =
                        Some(Transaction { knows_bound: *knows_bound, ..Transaction::default() });
                    out.push((("append", "begins"), next));
                }
            }
        }
    }

    fn members(&self, s: &State, slot: usize) -> Vec<usize> {
        let is_in = |at: &usize| match s.requests[*at] {
            Step::In(other) | Step::Decided(other, _) => other == slot,
            _ => false,
        };
        (0..self.requests()).filter(is_in).collect()
    }

    /// The locks that a transaction takes: those of the counters of its bounded adds.
    fn needed(&self, s: &State, slot: usize, transaction: &Transaction) -> [bool; 2] {
        let mut needed = [false; 2];
        for at in self.members(s, slot) {
            let token = self.token_of(at);
            let delta = self.scenario.tokens[token].delta;
            if self.is_bounded(token, transaction.knows_bound) {
                needed[0] |= delta[0] != 0;
                let is_left = delta[0] != 0 && self.breaks(Rule::BoundAllLocks);
                needed[1] |= delta[1] != 0 && !is_left;
            }
        }
        needed
    }

    /// `append`: the age and the locks in any order, then the counts, then the commit.
    fn append(&self, s: &State, slot: usize, transaction: &Transaction, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, change: &dyn Fn(&mut State, &mut Transaction)| {
            let mut next = s.clone();
            let mut changed = transaction.clone();
            change(&mut next, &mut changed);
            next.transactions[slot] = Some(changed);
            if self.members(&next, slot).is_empty() {
                next.transactions[slot] = None;
            }
            out.push((("append", what), next));
        };
        let needed = self.needed(s, slot, transaction);
        let is_locked = (0..2).all(|at| transaction.locks[at] || !needed[at]);
        if !transaction.flushed {
            push("is rolled back", &|next, _| self.give_up(next, slot));
        }
        if !transaction.checked {
            push("checks its age", &|next, changed| self.check(next, slot, changed));
        }
        let missing = (0..2).filter(|at| needed[*at] && !transaction.locks[*at]);
        let missing = missing.take(if self.breaks(Rule::BoundLocksInOrder) { 2 } else { 1 });
        for lock in missing.filter(|lock| !self.is_held(s, slot, *lock)) {
            push("locks", &|_, changed| changed.locks[lock] = true);
        }
        let may_count = is_locked || self.breaks(Rule::BoundCountAfterLock);
        if transaction.checked && may_count && transaction.written.is_none() {
            push("counts, and decides", &|next, changed| self.count(next, slot, changed));
        }
        if let Some(written) = &transaction.written {
            if !transaction.flushed && is_locked && !self.waits_for_insert(s, slot, written) {
                push("inserts, and its commit begins", &|next, changed| self.flush(next, slot, changed));
            }
        }
        if transaction.received {
            push("ends, and answers", &|next, changed| self.show(next, slot, changed, true));
        } else if transaction.flushed {
            push("ends without its standby: unknown", &|next, changed| self.show(next, slot, changed, false));
        }
    }

    fn is_held(&self, s: &State, slot: usize, lock: usize) -> bool {
        let others = s.transactions.iter().enumerate().filter(|(at, _)| *at != slot);
        let mut others = others.filter_map(|(_, each)| each.as_ref());
        others.any(|each| each.locks[lock] && !(each.flushed && self.breaks(Rule::BoundLockUntilCommit)))
    }

    /// Whether a transaction waits for a lock of the other one.
    pub(super) fn is_blocked(&self, s: &State, slot: usize) -> bool {
        s.transactions[slot].as_ref().is_some_and(|each| {
            let needed = self.needed(s, slot, each);
            let mut missing = (0..2).filter(|at| needed[*at] && !each.locks[*at]);
            missing.any(|lock| self.is_held(s, slot, lock))
        })
    }

    fn check(&self, s: &mut State, slot: usize, transaction: &mut Transaction) {
        transaction.checked = true;
        if self.breaks(Rule::BoundOneStatement) {
            transaction.head = Some(s.store.checkpoint);
        }
        for at in self.members(s, slot) {
            let token = self.token_of(at);
            if self.is_late(s, token) || s.store.decisions[token].is_some() {
                s.requests[at] = Step::Late;
            }
        }
    }

    /// Identities and counts are of one snapshot, and each add is decided after the ones before it.
    fn count(&self, s: &mut State, slot: usize, transaction: &mut Transaction) {
        let knows_bound = transaction.knows_bound;
        let mut work = s.store.clone();
        let mut written = [Place::Empty; TOKENS];
        for at in self.members(s, slot) {
            let token = self.token_of(at);
            let counted = if self.breaks(Rule::BoundEventsBefore) { &s.store } else { &work };
            let count = self.deciding(counted, transaction.head);
            let is_bounded = self.is_bounded(token, knows_bound);
            let decided = match is_bounded {
                true => self.decide(&work, token, knows_bound, count),
                false => Place::Accepted,
            };
            let known = if self.breaks(Rule::BoundRepeatedOnce) { &s.store } else { &work };
            let replay = self.replay(known, token, knows_bound);
            let answer = match (replay, decided) {
                (Some(_), Place::Refused(count)) if self.breaks(Rule::BoundIdentityFirst) => {
                    Answer::Refused(count)
                }
                (Some(answer), _) => answer,
                (None, Place::Refused(count)) => Answer::Refused(count),
                (None, _) => Answer::Accepted,
            };
            let is_written = decided.is_accepted() || !self.breaks(Rule::BoundRefusalWritten);
            if work.places[token] == Place::Empty && is_written {
                work.places[token] = decided;
                work.of_namespace[token] = knows_bound;
                written[token] = decided;
            }
            s.requests[at] = Step::Decided(slot, answer);
        }
        transaction.written = Some(written);
    }

    /// An insert waits for a transaction that has inserted the same event.
    fn waits_for_insert(&self, s: &State, slot: usize, written: &[Place; TOKENS]) -> bool {
        let others = s.transactions.iter().enumerate().filter(|(at, _)| *at != slot);
        let mut others = others.filter_map(|(_, each)| each.as_ref()).filter(|each| each.flushed);
        others.any(|each| {
            let theirs = each.written.unwrap_or([Place::Empty; TOKENS]);
            (0..TOKENS).any(|at| written[at] != Place::Empty && theirs[at] != Place::Empty)
        })
    }

    /// What was inserted by another one since the count is not inserted, and answers.
    fn flush(&self, s: &mut State, slot: usize, transaction: &mut Transaction) {
        let mut written = transaction.written.unwrap_or([Place::Empty; TOKENS]);
        for at in self.members(s, slot) {
            let token = self.token_of(at);
            let replay = self.replay(&s.store, token, transaction.knows_bound);
            if let (Some(answer), true) = (replay, written[token] != Place::Empty) {
                if !self.breaks(Rule::BoundStoredAnswers) {
                    s.requests[at] = Step::Decided(slot, answer);
                }
            }
        }
        for token in 0..TOKENS {
            if s.store.places[token] != Place::Empty {
                written[token] = Place::Empty;
            }
        }
        let is_refusal = written.iter().all(|place| matches!(place, Place::Empty | Place::Refused(_)));
        let is_replay = written.iter().all(|place| *place == Place::Empty);
        let is_fast = is_replay && self.breaks(Rule::BoundReplayWaits)
            || !is_replay && is_refusal && self.breaks(Rule::BoundRefusalWaits);
        transaction.written = Some(written);
        transaction.flushed = true;
        transaction.received = s.standby.is_none() || is_fast;
    }

    /// The transaction becomes visible, and its locks are free.
    fn show(&self, s: &mut State, slot: usize, transaction: &mut Transaction, is_answered: bool) {
        let knows_bound = transaction.knows_bound;
        let written = transaction.written.unwrap_or([Place::Empty; TOKENS]);
        let members = self.members(s, slot);
        for at in &members {
            let token = self.token_of(*at);
            let place = written[token];
            if place == Place::Empty || s.store.places[token] != Place::Empty {
                continue;
            }
            let is_bounded = self.is_bounded(token, knows_bound);
            let is_kept = s.bound == Bound::InForce;
            // By what it saw, it was right.
            let is_checked = !transaction.disturbed && is_bounded || is_kept && !is_bounded;
            if is_checked {
                let wrong = self.verify(&s.store, token, place, knows_bound, is_kept);
                s.wrong = s.wrong.or(wrong);
            }
            s.store.places[token] = place;
            s.store.of_namespace[token] = knows_bound && self.breaks(Rule::BoundOfNamespaceApart);
            if !is_bounded {
                self.disturb(s);
            }
        }
        for at in members {
            if let (Step::Decided(_, answer), true) = (s.requests[at], is_answered) {
                self.say(s, self.token_of(at), answer);
            }
            s.requests[at] = Step::Over;
        }
    }

    /// Something changes without the locks, so the counts that were read need not be the latest.
    fn disturb(&self, s: &mut State) {
        for each in s.transactions.iter_mut().flatten().filter(|each| each.written.is_some()) {
            each.disturbed = true;
        }
    }

    fn give_up(&self, s: &mut State, slot: usize) {
        for at in self.members(s, slot) {
            s.requests[at] = Step::Over;
        }
    }

    /// Whether an append that was admitted may write *token*.
    fn is_under_way(&self, s: &State, token: usize) -> bool {
        let admitted = |slot: usize| s.transactions[slot].as_ref().is_some_and(|each| each.checked);
        let mut slots = (0..TRANSACTIONS).filter(|slot| admitted(*slot));
        slots.any(|slot| self.members(s, slot).iter().any(|at| self.token_of(*at) == token))
    }

    /// `Resolver.resolve`, and a cancel: `settle` in functions.sql.
    fn resolve(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let token = self.token_of(at);
        let mut push = |what: &'static str, step: Step, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            change(&mut next);
            next.requests[at] = step;
            out.push((("request", what), next));
        };
        let is_synced = s.standby.is_none();
        let answering = |answer: Answer| Step::Answering(answer, is_synced);
        let decision = s.store.decisions[token];
        let settled = match decision {
            Some(Decision::Void) => Some(Answer::Void),
            Some(Decision::Cancelled(was_counted)) => Some(Answer::Cancelled(was_counted)),
            _ => None,
        };
        match (s.requests[at], settled) {
            (Step::New, settled) if self.is_cancel(at) => match settled {
                Some(answer @ Answer::Cancelled(_)) => {
                    push("adopts the decision", answering(answer), &|_| {})
                }
                _ => push("notes that a cancel is open", Step::Waiting, &|next| {
                    let was_applied = decision == Some(Decision::Applied);
                    if !matches!(decision, Some(Decision::OpenCancel(_))) {
                        next.store.decisions[token] = Some(Decision::OpenCancel(was_applied));
                    }
                }),
            },
            (Step::Late, settled) => match settled.or_else(|| self.found(&s.store, token)) {
                Some(answer) => push("finds its token", answering(answer), &|_| {}),
                None => push("notes that a decision is open", Step::Waiting, &|next| {
                    next.store.decisions[token] = decision.or(Some(Decision::Open));
                }),
            },
            (Step::Waiting, Some(answer)) if !self.is_cancel(at) || answer != Answer::Void => {
                push("adopts the decision", answering(answer), &|_| {})
            }
            (Step::Waiting, _) if !self.is_under_way(s, token) => match decision {
                Some(Decision::OpenCancel(was_applied)) => {
                    let mut next = s.clone();
                    let was_counted = self.remove(&mut next.store, token, was_applied);
                    self.disturb(&mut next);
                    next.requests[at] = answering(Answer::Cancelled(was_counted));
                    out.push((("request", "removes the event, and settles the cancel"), next));
                }
                _ => {
                    let is_stored = self.found(&s.store, token).is_some();
                    let settled = if is_stored { Decision::Applied } else { Decision::Void };
                    let mut store = s.store.clone();
                    store.decisions[token] = Some(settled);
                    let step = answering(self.found(&store, token).unwrap_or(Answer::Void));
                    push("settles the decision", step, &|next| next.store = store.clone());
                }
            },
            (Step::Answering(answer, true), _) => {
                push("is answered", Step::Over, &|next| self.say(next, token, answer))
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
            let written = each.written.unwrap_or([Place::Empty; TOKENS]);
            for token in (0..TOKENS).filter(|token| written[*token] != Place::Empty) {
                log.places[token] = written[token];
            }
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
        if self.scenario.failover {
            let mut next = State { store: standby.clone(), standby: None, ..s.clone() };
            next.transactions = [None, None];
            for step in next.requests.iter_mut().filter(|step| **step != Step::New) {
                *step = Step::Over;
            }
            out.push((("standby", "is the primary from now on"), next));
        }
    }

    fn roll(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let is_next = s.store.rolled + 1 < s.now && s.store.rolled < super::LAST;
        let window = s.store.rolled + 1;
        let in_window = |token: &usize| self.scenario.tokens[*token].time == window;
        let is_awaited = (0..TOKENS).filter(in_window).any(|token| self.is_under_way(s, token));
        if !(is_next && !is_awaited) && !s.store.pending {
            return;
        }
        let mut next = s.clone();
        next.store.rolled += super::Time::from(is_next && !is_awaited);
        self.check_point(&mut next.store);
        out.push((("worker", "moves a window into the checkpoint"), next));
    }
}
