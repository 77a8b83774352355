//! SQLite: one writer, which takes one request after the other into its transaction.

use super::{Answer, Decision, Holds, Kind, State, Step, Work};
use crate::checker::Label;

impl Holds {
    pub(super) fn sqlite(&self, s: &State, out: &mut Vec<(Label, State)>) {
        for at in (0..self.requests()).filter(|at| s.requests[*at] == Step::New) {
            self.take(s, at, out);
        }
        match &s.writer {
            Some(work) => self.finish(s, work, out),
            None if s.store.rolled + 1 < s.now => self.roll(s, out),
            None => {}
        }
    }

    /// The writer takes a request into its transaction.
    fn take(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let mut work = next.writer.take().unwrap_or(Work { store: s.store.clone(), wrong: None });
        let (subject, clock) = (self.subject(at), self.clock(s, &work.store));
        let now = self.end_clock(s, &work.store);
        let answer = match self.kind(at) {
            // The model has no late adds.
            Kind::Add if clock > self.scenario.adds[subject].time => return,
            Kind::Hold => {
                let is_late = clock > self.scenario.holds[subject].time;
                let held = &mut work.store.holds[subject];
                let known = self.decided(held).or_else(|| self.stored(held).filter(|_| is_late));
                if let Some(answer) = known {
                    answer
                } else if is_late {
                    held.decision = Some(Decision::Void);
                    Answer::Void
                } else {
                    self.act(&mut work, at, now)
                }
            }
            _ => self.act(&mut work, at, now),
        };
        work.wrong = work.wrong.or_else(|| self.outdated(s, at, answer));
        next.requests[at] = Step::Decided(0, answer);
        next.writer = Some(work);
        out.push((("writer", self.label(at)), next));
    }

    pub(super) fn label(&self, at: usize) -> &'static str {
        match self.kind(at) {
            Kind::Hold => "takes a hold",
            Kind::Settle(_) => "takes a settle",
            Kind::Release => "takes a release",
            Kind::Extend => "takes an extension",
            Kind::Expire => "takes an expiry",
            Kind::Cancel => "takes a cancel of the hold's token",
            Kind::Add if self.scenario.adds[self.subject(at)].clear => "takes a clear",
            Kind::Add if self.scenario.adds[self.subject(at)].bounded => "takes a bounded add",
            Kind::Add => "takes a plain add",
        }
    }

    /// The transaction commits, or reports an error, or the process restarts.
    fn finish(&self, s: &State, work: &Work, out: &mut Vec<(Label, State)>) {
        let mut lost = s.clone();
        lost.writer = None;
        for step in &mut lost.requests {
            *step = match *step {
                Step::Decided(_, Answer::Again) => Step::New,
                Step::Decided(..) => Step::Over,
                other => other,
            };
        }
        out.push((("writer", "restarts"), lost.clone()));
        lost.store = work.store.clone();
        lost.wrong = s.wrong.or(work.wrong);
        out.push((("writer", "commits, and reports an error"), lost.clone()));
        for at in 0..self.requests() {
            if let Step::Decided(_, answer) = s.requests[at] {
                self.say(&mut lost, at, answer);
            }
        }
        out.push((("writer", "commits, and answers"), lost));
    }
}
