//! One state for all that can do the same from now on: what no step can use any more is forgotten,
//! and what is interchangeable is sorted.

use super::state::{Batch, By, Marks, Settling, Sight, State, Step, Time, Times, Worker, TWO};
use super::{Log, WINDOW, WRITE_TIMEOUT};
use crate::rules::Rule;

impl Log {
    pub fn canonical(&self, s: &mut State) {
        for at in 0..self.scenario.requests.len() + self.scenario.cancels {
            if self.has_ended(s, self.token_of(at), s.requests[at]) {
                s.requests[at] = Step::Over;
            }
        }
        self.forget_events(s);
        let first_reading = *self.readings(s.now).start();
        for counter in &mut s.counters {
            for removed in &mut counter.removed {
                // No earlier recount can be left any more.
                *removed = removed.between(first_reading - 1, 31);
            }
        }
        if let Some(at) = s.retired {
            s.retired = Some(at.max(self.retired_first()));
        }
        self.forget_marks(s);
        for worker in &mut s.workers {
            self.forget_batch(worker);
        }
        self.sort(s);
    }

    /// Whether a request has no step left, or only some that change nothing.
    fn has_ended(&self, s: &State, token: usize, step: Step) -> bool {
        let time = self.scenario.tokens[token];
        let first_reading = *self.readings(s.now).start();
        match step {
            Step::Marked => {
                !self.breaks(Rule::SecondAgeCheck) && time < first_reading - self.scenario.accept_limit
            }
            Step::Sent(began) => !self.breaks(Rule::Deadline) && s.now - began > WRITE_TIMEOUT,
            Step::New | Step::Decided(_) => self.is_missing(s, time),
            _ => false,
        }
    }

    /// No write of an event that is hidden, or whose table is gone, makes a difference.
    fn forget_events(&self, s: &mut State) {
        if self.breaks(Rule::TombstoneStays) {
            return;
        }
        for item in &self.items {
            let is_gone = self.is_gone(s, item.time);
            s.sent[item.at] &= !is_gone && !s.hidden[item.at];
            s.hidden[item.at] &= !is_gone;
        }
    }

    /// A slice that was retired earlier is dropped no earlier.
    fn retired_first(&self) -> Time {
        let retention = self.scenario.retention.filter(|_| !self.breaks(Rule::DropAfterRetention));
        self.slice_end() + retention.unwrap_or(0) - WINDOW - self.scenario.skew
    }

    /// No mark is used that was passed, or that is beside one that names a decision. Windows that close
    /// after the horizon are read together, when all is quiet: there one mark is as good as many.
    fn forget_marks(&self, s: &mut State) {
        let unread = self.closed_through(*self.readings(self.scenario.horizon).end());
        for shard in 0..self.scenario.shards {
            let mut landed = s.atomic_marks[shard].between(s.watermarks[shard], 31);
            let mut sent = s.marks_sent[shard].between(s.watermarks[shard], 31).without(landed);
            for sight in [Sight::Decision, Sight::Cancel] {
                landed.0[0].remove(landed.of(sight));
                sent.0[0].remove(landed.of(sight));
            }
            let is_full = self.scenario.full_marks;
            let late = landed.of(Sight::Nothing).between(if is_full { unread } else { 31 }, 31);
            if let Some(first) = late.first() {
                landed.0[0].remove(late);
                landed.add(Sight::Nothing, first);
                let others = sent.of(Sight::Nothing).between(unread, 31);
                sent.0[0].remove(others);
            }
            s.atomic_marks[shard] = landed;
            s.marks_sent[shard] = sent;
        }
    }

    /// A batch is planned again only if a slice was dropped, and never after it was summed.
    fn forget_batch(&self, worker: &mut Worker) {
        let batch = match worker {
            Worker::Planned(batch, _) if self.scenario.retention.is_none() => batch,
            Worker::Summed(batch, _) => batch,
            Worker::Settling(_, settling) => return self.forget_settling(settling),
            _ => return,
        };
        let none = [[false; TWO]; TWO];
        *batch = Batch { adds: none, recounts: none, ..*batch };
    }

    /// After the look-up a worker uses only those marks that do not name the decision, unless other
    /// shards are to know what it settled.
    fn forget_settling(&self, settling: &mut Settling) {
        if self.scenario.shards > 1 || matches!(settling.step, None | Some(Step::New | Step::Looked(_))) {
            return;
        }
        let lacking = match settling.by {
            By::WorkerThatAdopts(sight) if self.scenario.full_marks => settling.marks.lacking(sight),
            _ => Times::default(),
        };
        settling.marks = Marks([lacking, Times::default(), Times::default()]);
    }

    /// Requests of one token, cancels, and workers are interchangeable.
    fn sort(&self, s: &mut State) {
        let tokens = self.scenario.requests;
        for token in 0..TWO {
            let first = tokens.partition_point(|each| *each < token);
            let end = tokens.partition_point(|each| *each <= token);
            s.requests[first..end].sort_unstable();
        }
        s.requests[tokens.len()..tokens.len() + self.scenario.cancels].sort_unstable();
        if self.scenario.shards == 1 {
            s.workers[..self.scenario.workers].sort_unstable();
        }
    }
}
