//! The rollup worker (rollup/worker.py, rollup/atomics.py, rollup/batches.py, rollup/roller.py) and
//! the drop of slices (rollup/maintenance.py).

use super::state::{Batch, Count, Events, Head, Plan, State, Step, Time, Times, Update, Worker, TWO};
use super::{Log, WINDOW};
use crate::checker::Label;
use crate::rules::Rule;

type Next = (&'static str, State, Worker);

impl Log {
    /// Append the steps of worker *at*. It may stop anywhere, and the next pass repeats its work.
    pub fn worker_steps(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = self.roll(s, s.workers[at]);
        if s.workers[at] != Worker::Idle {
            next.push(("stops", s.clone(), Worker::Idle));
        }
        for (what, mut state, worker) in next {
            state.workers[at] = worker;
            out.push((("worker", what), state));
        }
    }

    /// `RollupWorker.roll_shard`: clock, `dropped_before`, watermark, marks, heads, events.
    pub fn roll(&self, s: &State, worker: Worker) -> Vec<Next> {
        match worker {
            Worker::Idle => self.begin(s),
            Worker::Unclocked(batch) => self
                .readings(s.now)
                .filter(|reading| self.closed_through(*reading) > s.watermark)
                .map(|reading| {
                    let mut closed = batch;
                    closed.through = self.closed_through(reading);
                    closed.reaches = closed.reaches.min(closed.through);
                    ("reads the clock", s.clone(), self.after_marks(s, closed))
                })
                .collect(),
            Worker::Settling(batch, step) => self.settle(s, batch, step),
            Worker::Marked(batch) => vec![self.plan_all(s, batch)],
            Worker::Planned(batch, plans) => vec![self.sum(s, batch, plans)],
            Worker::Summed(batch, updates) => self.apply(s, batch, updates),
            Worker::Advancing(through) => vec![self.advance(s, through)],
        }
    }

    fn begin(&self, s: &State) -> Vec<Next> {
        if self.breaks(Rule::ClockBeforeMarks) {
            let batch = self.dirty(s, s.watermark, self.scenario.horizon, s.dropped_before);
            return vec![("reads the marks", s.clone(), Worker::Unclocked(batch))];
        }
        // The clock, then the marks. A mark that lands in between in a window that is closed is of
        // a write that will be late, or of recounts that will be left again.
        self.readings(s.now)
            .map(|reading| self.closed_through(reading))
            .filter(|through| *through > s.watermark)
            .map(|through| {
                let batch = self.dirty(s, s.watermark, through, s.dropped_before);
                ("reads the clock and the marks", s.clone(), self.after_marks(s, batch))
            })
            .collect()
    }

    /// `RollupStore.dirty`: the marks of windows in `(after, through]`.
    fn dirty(&self, s: &State, after: Time, through: Time, dropped_before: Time) -> Batch {
        let none = [[false; TWO]; TWO];
        let mut batch = Batch { through, reaches: -1, dropped_before, adds: none, recounts: none };
        for (at, counter) in s.counters.iter().enumerate() {
            for (window, time) in self.windows() {
                if counter.marks[window] && after < time && time <= through {
                    batch.adds[at][window] = true;
                    batch.reaches = batch.reaches.max(time);
                }
                if let Some(left) = counter.recounts[window].between(after, through).last() {
                    // Ignored, the mark of a recount is one of an add in the window it was left in.
                    batch.recounts[at][window] = !self.breaks(Rule::RecountMarksRead);
                    batch.reaches = batch.reaches.max(left);
                }
            }
        }
        batch
    }

    /// Atomic adds are settled before their windows are summed.
    fn after_marks(&self, s: &State, batch: Batch) -> Worker {
        match s.atomic_marks.between(s.watermark, batch.through).has_any() {
            true => Worker::Settling(batch, None),
            false => Worker::Marked(batch),
        }
    }

    /// `AtomicSettler.settle` and its `_resolve_halves`.
    fn settle(&self, s: &State, batch: Batch, step: Option<Step>) -> Vec<Next> {
        let step = if let Some(step) = step {
            step
        } else {
            let found = self.find(s, 0);
            let leaves = match found {
                Events::All => s.decided[0].is_none() || self.breaks(Rule::DecisionLookedUp),
                Events::Some => self.breaks(Rule::HalvesSettled),
                Events::None => self.breaks(Rule::NothingFoundSettled),
            };
            let next = if leaves || s.table_gone {
                Worker::Marked(batch)
            } else {
                Worker::Settling(batch, Some(Step::New))
            };
            return vec![("looks an atomic add up", s.clone(), next)];
        };
        self.resolve(s, 0, step, true)
            .into_iter()
            .map(|(what, state, next)| {
                let is_settled = what == "has settled the atomic add";
                let worker = match next {
                    Step::Over if is_settled => Worker::Marked(batch),
                    Step::Over => self.before_pending(&state, batch),
                    _ => Worker::Settling(batch, Some(next)),
                };
                (what, state, worker)
            })
            .collect()
    }

    /// An atomic add that may be in flight delays its window and later ones, not earlier ones.
    fn before_pending(&self, s: &State, batch: Batch) -> Worker {
        if self.breaks(Rule::SettledBeforeSummed) {
            return Worker::Marked(batch);
        }
        match s.atomic_marks.between(s.watermark, batch.through).first() {
            Some(window) if window - 1 > s.watermark => {
                Worker::Marked(self.dirty(s, s.watermark, window - 1, batch.dropped_before))
            }
            _ => Worker::Idle,
        }
    }

    /// `BatchRoller._roll_once`, its first half: heads, plans and rows.
    fn plan_all(&self, s: &State, batch: Batch) -> Next {
        let mut state = s.clone();
        if self.breaks(Rule::CountersBeforeWatermark) {
            self.move_watermark(&mut state, batch.through);
        }
        if self.breaks(Rule::MarksUntilPassed) {
            self.drop_marks(&mut state, batch.through);
        }
        let mut plans = [None; TWO];
        for at in 0..TWO {
            if (0..TWO).any(|window| batch.adds[at][window] || batch.recounts[at][window])
                || s.counters[at]
                    .recounts
                    .iter()
                    .any(|left| left.between(s.watermark, batch.through).has_any())
            {
                plans[at] = self.plan(s, at, &batch);
            }
        }
        if plans == [None; TWO] {
            return ("has no marks", state, Worker::Advancing(batch.through));
        }
        ("reads heads and rows", state, Worker::Planned(batch, plans))
    }

    /// `plan` in rollup/roller.py; then, if it is whole, `read_partitions`.
    fn plan(&self, s: &State, at: usize, batch: &Batch) -> Option<Plan> {
        let Head { checkpoint, settled, pending } = s.counters[at].head;
        let target = batch.reaches.max(checkpoint.0);
        let pending = self.recounts_of(&pending, settled.0, target, batch.dropped_before);
        let mut sums = [false; TWO];
        let mut recounts = false;
        for (window, time) in self.windows() {
            let is_new = batch.adds[at][window] && time > checkpoint.0;
            let again =
                batch.adds[at][window] && time <= checkpoint.0 && !self.breaks(Rule::CountedWindowsAgain);
            let is_known = settled.0 < time && time <= target && time >= batch.dropped_before;
            let recount = (batch.recounts[at][window] || again) && is_known || pending[window];
            sums[window] = is_new || recount;
            recounts |= recount;
        }
        let settles = batch.dropped_before - 1 > settled.0;
        let has_pending = s.counters[at].head.pending.iter().any(|left| left.has_any());
        if sums == [false; TWO] && !has_pending && checkpoint.0 >= batch.reaches {
            return None;
        }
        let whole = recounts || settles;
        Some(Plan { head: s.counters[at].head, rows: s.counters[at].rows, sums, whole, settles })
    }

    /// `recounts_of` in counter/core/read.py: the windows that pending recounts ask for.
    pub fn recounts_of(
        &self,
        pending: &[Times; TWO],
        settled: Time,
        through: Time,
        dropped_before: Time,
    ) -> [bool; TWO] {
        let mut wanted = [false; TWO];
        for (window, time) in self.windows() {
            let is_known = settled < time && time <= through && time >= dropped_before;
            wanted[window] = pending[window].has_any() && is_known;
        }
        wanted
    }

    /// `EventStore.sums`, and `update` in rollup/roller.py.
    fn sum(&self, s: &State, batch: Batch, plans: [Option<Plan>; TWO]) -> Next {
        let gone = |plan: &Plan| s.table_gone && plan.sums != [false; TWO];
        if plans.iter().flatten().any(gone) {
            // SliceMissingError: start again with what is dropped now.
            let again = Batch { dropped_before: s.dropped_before, ..batch };
            return ("finds a slice dropped", s.clone(), Worker::Marked(again));
        }
        let mut updates = [None; TWO];
        for at in 0..TWO {
            updates[at] = plans[at].map(|plan| self.update(s, at, &plan, &batch));
        }
        ("sums events", s.clone(), Worker::Summed(batch, updates))
    }

    fn update(&self, s: &State, at: usize, plan: &Plan, batch: &Batch) -> Update {
        let head = &plan.head;
        let target = batch.reaches.max(head.checkpoint.0);
        let mut fresh = [None; TWO];
        for (window, _) in self.windows() {
            fresh[window] = plan.sums[window].then(|| self.sum_of(s, at, window));
        }
        let mut count = head.checkpoint.1;
        let mut settled = None;
        if plan.whole && self.breaks(Rule::RecountFoldsRows) {
            for window in 0..TWO {
                let before = plan.rows[window].unwrap_or_default();
                count = count.plus(fresh[window].unwrap_or(before)).minus(before);
            }
        } else if plan.whole {
            let from = head.settled.1;
            count = from;
            let through = batch.dropped_before - 1;
            let mut old = from;
            for (window, time) in self.windows() {
                let is_settled = time <= head.settled.0;
                let row = plan.rows[window].filter(|_| !is_settled && time <= target);
                let row = row.filter(|_| !self.breaks(Rule::RecountFoldsAllRows));
                let row = fresh[window].or(row).unwrap_or_default();
                count = count.plus(row);
                if time <= through {
                    old = old.plus(row);
                }
            }
            settled = plan.settles.then_some((through, old));
        } else {
            count = fresh.iter().flatten().fold(count, |count, row| count.plus(*row));
        }
        let pending_done = self.pending_done(head, batch, target);
        Update { rows: fresh, checkpoint: (target, count), settled, pending_done }
    }

    fn pending_done(&self, head: &Head, batch: &Batch, target: Time) -> [Times; TWO] {
        let mut done = head.pending;
        for (window, time) in self.windows() {
            if !self.breaks(Rule::PendingUntilPassed) {
                done[window] = done[window].between(-1, batch.reaches - WINDOW + 1);
            }
            if time > target {
                done[window] = Default::default();
            }
        }
        done
    }

    /// What the events of a window add to a counter.
    pub fn sum_of(&self, s: &State, counter: usize, window: usize) -> Count {
        let mut count = Count::default();
        for item in &self.items {
            if item.counter == counter && item.window == window && s.landed[item.at] {
                count.0[item.at] += 1;
            }
        }
        count
    }

    /// `RollupStore.apply`: counter by counter. A batch is cut off where its worker stops, and of
    /// the last counter one replica may have all of it: then a read of the head repairs the head
    /// alone, and a read of the rows repairs the rows alone.
    fn apply(&self, s: &State, batch: Batch, updates: [Option<Update>; TWO]) -> Vec<Next> {
        let (at, update) = match (0..TWO).find_map(|at| Some((at, updates[at]?))) {
            Some(first) => first,
            None => {
                let next = Worker::Advancing(batch.through);
                return vec![("has written all counters", s.clone(), next)];
            }
        };
        let mut left = updates;
        left[at] = None;
        let mut next = Vec::new();
        // Of equal timestamps a random part decides.
        for wins in [true, false] {
            let mut whole = s.clone();
            self.write_head(&mut whole, at, &batch, &update, wins);
            let mut rows = s.clone();
            self.write_rows(&mut rows, at, &batch, &update, wins);
            self.write_rows(&mut whole, at, &batch, &update, wins);
            let mut head = s.clone();
            self.write_head(&mut head, at, &batch, &update, wins);
            next.push(("writes a counter", whole, Worker::Summed(batch, left)));
            next.push(("stops, and only the head is repaired", head, Worker::Idle));
            next.push(("stops, and only the rows are repaired", rows, Worker::Idle));
        }
        next
    }

    /// Whether a write of *batch* replaces what has *stamp*.
    fn replaces(&self, batch: &Batch, stamp: Time, wins: bool) -> bool {
        batch.reaches > stamp || batch.reaches == stamp && wins || self.breaks(Rule::StampedByBatch)
    }

    fn write_head(&self, s: &mut State, at: usize, batch: &Batch, update: &Update, wins: bool) {
        let replaces = self.replaces(batch, s.counters[at].checkpoint_stamp, wins);
        let counter = &mut s.counters[at];
        if replaces {
            counter.head.checkpoint = update.checkpoint;
            counter.checkpoint_stamp = batch.reaches;
        }
        for window in 0..TWO {
            let mut done = update.pending_done[window];
            if self.breaks(Rule::PendingOnlyWhenRead) {
                done = counter.head.pending[window];
            }
            counter.head.pending[window].remove(done);
            counter.removed[window] = counter.removed[window].with(done);
        }
        self.write_settled(s, at, update);
    }

    fn write_rows(&self, s: &mut State, at: usize, batch: &Batch, update: &Update, wins: bool) {
        for (window, _) in self.windows() {
            let replaces = self.replaces(batch, s.counters[at].row_stamps[window], wins);
            if update.rows[window].is_some() && replaces {
                s.counters[at].rows[window] = update.rows[window];
                s.counters[at].row_stamps[window] = batch.reaches;
            }
        }
        self.write_settled(s, at, update);
    }

    fn write_settled(&self, s: &mut State, at: usize, update: &Update) {
        if let Some(settled) = update.settled {
            // Its timestamp is its own instant.
            if settled.0 > s.counters[at].head.settled.0 {
                s.counters[at].head.settled = settled;
            }
        }
    }

    /// `RollupStore.advance`, then `drop_marks`.
    fn advance(&self, s: &State, through: Time) -> Next {
        let mut state = s.clone();
        self.move_watermark(&mut state, through);
        ("moves the watermark", state, Worker::Idle)
    }

    /// A watermark never moves back. The marks up to it are never read again, so they are dropped
    /// here; that a worker drops them later, or a crash leaves them, makes no difference.
    fn move_watermark(&self, s: &mut State, through: Time) {
        s.watermark = s.watermark.max(through);
        let watermark = s.watermark;
        self.drop_marks(s, watermark);
    }

    fn drop_marks(&self, s: &mut State, through: Time) {
        for counter in &mut s.counters {
            for (window, time) in self.windows() {
                counter.marks[window] &= time > through;
                counter.recounts[window] = counter.recounts[window].between(through, 31);
            }
        }
        s.atomic_marks = s.atomic_marks.between(through, 31);
    }

    /// `Maintenance._drop_slices`: retire, then move `dropped_before`, then drop the table.
    pub fn maintenance_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let retention = match self.scenario.retention {
            Some(retention) => retention,
            None => return,
        };
        let end = self.slice_end();
        let retention = if self.breaks(Rule::DropAfterRetention) { 0 } else { retention };
        let needs_watermark = !self.breaks(Rule::DropAfterRollup);
        for reading in self.readings(s.now) {
            let due = match s.retired {
                None => end,
                Some(at) => (end + retention).max(at + WINDOW + self.scenario.skew),
            };
            if reading < due || needs_watermark && s.watermark < due {
                continue;
            }
            let mut state = s.clone();
            let what = match (s.retired, s.dropped_before, s.table_gone) {
                (None, _, _) => {
                    state.retired = Some(reading);
                    "retires the slice"
                }
                (_, before, _) if before < end => {
                    state.dropped_before = end;
                    "moves dropped_before"
                }
                (_, _, false) => {
                    state.table_gone = true;
                    state.landed = [false; TWO];
                    "drops the table"
                }
                _ => continue,
            };
            out.push((("maintenance", what), state));
        }
    }
}
