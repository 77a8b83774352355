//! SQLite: one writer, which decides one request after the other in its transaction.

use super::{difference, sum, Answer, Bound, Bounds, Counts, Decision, Place, State, Step, Store, Writer};
use crate::checker::Label;
use crate::rules::Rule;

impl Bounds {
    pub(super) fn sqlite(&self, s: &State, out: &mut Vec<(Label, State)>) {
        for at in (0..self.requests()).filter(|at| s.requests[*at] == Step::New) {
            self.take(s, at, out);
        }
        match &s.writer {
            Some(writer) => self.end(s, writer, out),
            None => self.roll_up(s, out),
        }
    }

    /// The writer takes a request into its transaction.
    fn take(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let first = Writer { work: s.store.clone(), running: [0, 0], cleared: false, wrong: None };
        let mut writer = next.writer.take().unwrap_or(first);
        let token = self.token_of(at);
        let (what, answer) = if self.is_cancel(at) {
            ("cancels", self.cancel_in(&mut writer, token))
        } else if let Some(answer) = self.known_in(s, &writer, token) {
            ("finds its token", answer)
        } else if self.is_late(s, token) {
            writer.work.decisions[token] = Some(Decision::Void);
            ("is late, and void", Answer::Void)
        } else {
            if !self.scenario.tokens[token].clear {
                self.fail(s, at, &writer, out);
            }
            ("is decided", self.add_in(s, &mut writer, token))
        };
        next.requests[at] = Step::Decided(0, answer);
        next.writer = Some(writer);
        out.push((("writer, a request", what), next));
    }

    /// What is known of the token: the event or refusal first, then the decision.
    fn known_in(&self, s: &State, writer: &Writer, token: usize) -> Option<Answer> {
        let knows_bound = s.bound == Bound::InForce;
        if self.breaks(Rule::BoundIdentityFirst)
            && self.is_bounded(token, knows_bound)
            && !self.is_late(s, token)
        {
            let place = self.decide(&writer.work, token, knows_bound, self.count_in(s, writer));
            if let Place::Refused(count) = place {
                return Some(Answer::Refused(count));
            }
        }
        match writer.work.decisions[token] {
            Some(Decision::Cancelled(was_counted)) => return Some(Answer::Cancelled(was_counted)),
            Some(Decision::Void) => return Some(Answer::Void),
            _ => {}
        }
        if self.is_late(s, token) {
            return self.found(&writer.work, token);
        }
        let store = if self.breaks(Rule::BoundRepeatedOnce) { &s.store } else { &writer.work };
        self.replay(store, token, knows_bound)
    }

    /// The count that decides: checkpoint, live tail, and what the transaction has changed.
    fn count_in(&self, s: &State, writer: &Writer) -> Counts {
        let work = &writer.work;
        let kept = self.kept_room(work);
        let running = if self.breaks(Rule::BoundEventsBefore) { [0, 0] } else { writer.running };
        let is_read = writer.cleared && !self.breaks(Rule::BoundClearRead);
        match s.tail {
            Some(tail) if !is_read && (!work.pending || self.breaks(Rule::BoundPendingCounts)) => {
                sum(kept, sum(work.checkpoint, sum(tail, running)))
            }
            // The log has the events of the transaction already.
            _ if self.breaks(Rule::BoundLogHasThem) => sum(self.deciding(work, None), running),
            _ => self.deciding(work, None),
        }
    }

    fn add_in(&self, s: &State, writer: &mut Writer, token: usize) -> Answer {
        let is_kept = s.bound == Bound::InForce;
        let place = self.decide(&writer.work, token, is_kept, self.count_in(s, writer));
        let wrong = self.verify(&writer.work, token, place, is_kept, is_kept);
        writer.wrong = writer.wrong.or(wrong);
        let is_written = place.is_accepted() || !self.breaks(Rule::BoundRefusalWritten);
        if is_written {
            writer.work.places[token] = place;
            writer.work.of_namespace[token] = is_kept && self.breaks(Rule::BoundOfNamespaceApart);
        }
        if self.scenario.tokens[token].clear {
            writer.cleared = true;
        }
        writer.running = sum(writer.running, self.counts(token, place));
        match place {
            Place::Refused(count) => Answer::Refused(count),
            _ => Answer::Accepted,
        }
    }

    fn cancel_in(&self, writer: &mut Writer, token: usize) -> Answer {
        if let Some(Decision::Cancelled(was_counted)) = writer.work.decisions[token] {
            return Answer::Cancelled(was_counted);
        }
        let place = writer.work.places[token];
        let is_in_tail = self.scenario.tokens[token].time > writer.work.rolled;
        if is_in_tail && !self.breaks(Rule::BoundRemovalsBefore) {
            writer.running = difference(writer.running, self.counts(token, place));
        }
        if self.scenario.tokens[token].clear && place.is_accepted() {
            writer.cleared = true;
        }
        Answer::Cancelled(self.remove(&mut writer.work, token, false))
    }

    /// An add is rolled back to its savepoint, and the transaction goes on.
    fn fail(&self, s: &State, at: usize, writer: &Writer, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let mut kept = writer.clone();
        if self.breaks(Rule::BoundUndoneUncounted) {
            self.add_in(s, &mut kept, self.token_of(at));
            (kept.work, kept.wrong) = (writer.work.clone(), writer.wrong);
        }
        next.requests[at] = Step::Over;
        next.writer = Some(kept);
        out.push((("writer, a request", "fails, and is rolled back"), next));
    }

    /// The transaction commits, or reports an error, or the process restarts.
    fn end(&self, s: &State, writer: &Writer, out: &mut Vec<(Label, State)>) {
        let mut lost = s.clone();
        lost.writer = None;
        for step in &mut lost.requests {
            if matches!(step, Step::Decided(..)) {
                *step = Step::Over;
            }
        }
        let forgotten = if self.breaks(Rule::BoundTailForgotten) { s.tail } else { None };
        out.push((("writer", "restarts"), State { tail: None, ..lost.clone() }));
        let (store, wrong) = (writer.work.clone(), s.wrong.or(writer.wrong));
        let on_disk = State { tail: forgotten, store: store.clone(), wrong, ..lost.clone() };
        out.push((("writer", "commits, and reports an error"), on_disk));

        let tail = s.tail.filter(|_| !writer.cleared);
        let tail = tail.map(|tail| sum(tail, difference(self.tail_of(&store), self.tail_of(&s.store))));
        let mut next = State { tail, store, wrong, ..lost };
        for at in 0..self.requests() {
            if let Step::Decided(_, answer) = s.requests[at] {
                self.say(&mut next, self.token_of(at), answer);
            }
        }
        out.push((("writer", "commits, and answers"), next));
    }

    /// The sum of the events that the checkpoint does not have.
    fn tail_of(&self, store: &Store) -> Counts {
        self.fold(store, store.rolled, false).1
    }

    fn roll_up(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let is_next = s.store.rolled + 1 < s.now && s.store.rolled < super::LAST;
        if !is_next && !s.store.pending {
            return;
        }
        let mut next = s.clone();
        let before = self.tail_of(&s.store);
        next.store.rolled += super::Time::from(is_next);
        self.check_point(&mut next.store);
        let (is_cleared, after) = self.fold(&next.store, next.store.rolled, false);
        // What was forgotten is whole again when the checkpoint has all of it.
        next.tail = match s.tail {
            Some(tail) => Some(difference(tail, difference(before, after))),
            None if !is_cleared && next.store.rolled == super::LAST => Some([0, 0]),
            None => None,
        };
        out.push((("worker", "moves a window into the checkpoint"), next));
    }
}
