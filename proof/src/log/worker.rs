//! The rollup worker (rollup/worker.py, rollup/atomics.py, rollup/batches.py, rollup/roller.py) and
//! the drop of slices (rollup/maintenance.py).

use super::request::STOPS_HALF_MARKED;
use super::state::{
    Batch, By, Count, Events, Head, Marks, Outcome, Plan, Settling, Sight, State, Step, Time, Times, Update,
    Worker, TWO,
};
use super::{Log, WINDOW};
use crate::checker::Label;
use crate::rules::Rule;

type Next = (&'static str, State, Worker);

impl Log {
    /// Append the steps of worker *at*. It may stop anywhere, and the next pass repeats its work.
    pub fn worker_steps(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let shard = if self.scenario.shards > 1 { at } else { 0 };
        let mut next = self.roll(s, s.workers[at], shard);
        if s.workers[at] != Worker::Idle {
            next.push(("stops", s.clone(), Worker::Idle));
        }
        for (what, mut state, worker) in next {
            state.workers[at] = worker;
            out.push((("worker", what), state));
        }
    }

    /// `RollupWorker.roll_shard`: clock, `dropped_before`, watermark, marks, heads, events.
    pub fn roll(&self, s: &State, worker: Worker, shard: usize) -> Vec<Next> {
        match worker {
            Worker::Idle => self.begin(s, shard),
            Worker::Unclocked(batch) => self
                .readings(s.now)
                .filter(|reading| self.closed_through(*reading) > s.watermarks[shard])
                .map(|reading| {
                    let mut closed = batch;
                    closed.through = self.closed_through(reading);
                    closed.reaches = closed.reaches.min(closed.through);
                    ("reads the clock", s.clone(), self.after_marks(s, closed))
                })
                .collect(),
            Worker::Settling(batch, settling) if settling.step.is_none() => {
                self.look_atomic_up(s, batch, settling.marks)
            }
            Worker::Settling(batch, settling) => self.settle(s, batch, settling),
            Worker::Marked(batch) => vec![self.plan_all(s, batch)],
            Worker::Headed(batch, plans) => vec![self.read_rows(s, batch, plans)],
            Worker::Planned(batch, plans) => vec![self.sum(s, batch, plans)],
            Worker::Summed(batch, updates) => self.apply(s, batch, updates),
            Worker::Advancing(shard, through) => vec![self.advance(s, shard, through)],
        }
    }

    fn begin(&self, s: &State, shard: usize) -> Vec<Next> {
        if self.breaks(Rule::ClockBeforeMarks) {
            let batch = self.dirty(s, shard, self.scenario.horizon, s.dropped_before);
            return vec![("reads the marks", s.clone(), Worker::Unclocked(batch))];
        }
        // The clock, then the marks. A mark that lands in between in a window that is closed is of
        // a write that will be late, or of recounts that will be left again.
        self.readings(s.now)
            .map(|reading| self.closed_through(reading))
            .filter(|through| *through > s.watermarks[shard])
            .map(|through| {
                let batch = self.dirty(s, shard, through, s.dropped_before);
                ("reads the clock and the marks", s.clone(), self.after_marks(s, batch))
            })
            .collect()
    }

    /// `RollupStore.dirty`: the marks of windows after the watermark, up to *through*.
    fn dirty(&self, s: &State, shard: usize, through: Time, dropped_before: Time) -> Batch {
        let after = s.watermarks[shard];
        let none = [[false; TWO]; TWO];
        let mut batch = Batch { shard, through, reaches: -1, dropped_before, adds: none, recounts: none };
        let ours = s.counters.iter().enumerate().filter(|(at, _)| self.shard_of(*at) == shard);
        for (at, counter) in ours {
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
        let marks = self.atomic_marks(s, &batch);
        match marks.all().has_any() {
            true => Worker::Settling(batch, Settling { marks, step: None, by: By::Worker }),
            false => self.marked(batch),
        }
    }

    /// A batch without marks reads and writes nothing.
    fn marked(&self, batch: Batch) -> Worker {
        match batch.reaches {
            -1 => Worker::Advancing(batch.shard, batch.through),
            _ => Worker::Marked(batch),
        }
    }

    /// `SeparateWrites.dirty_atomic`: the windows of the batch in which the atomic add is marked.
    fn atomic_marks(&self, s: &State, batch: &Batch) -> Marks {
        s.atomic_marks[batch.shard].between(s.watermarks[batch.shard], batch.through)
    }

    /// *marks* are settled: the process remembers it for its other shards.
    fn remember(&self, s: &mut State, marks: Marks) {
        if self.scenario.shards > 1 {
            s.settled = s.settled.with(marks);
        }
    }

    /// `AtomicSettler._settle_once`, and the look-up of `_resolve_incomplete`.
    fn look_atomic_up(&self, s: &State, batch: Batch, marks: Marks) -> Vec<Next> {
        let unknown = marks.without(s.settled);
        let mut all = Vec::new();
        // It knows of those that are settled only if its process has settled them.
        for left in [marks, unknown].iter().take(if unknown == marks { 1 } else { 2 }) {
            if !left.all().has_any() {
                all.push(("knows that an atomic add is settled", s.clone(), self.marked(batch)));
                continue;
            }
            for by in self.ways(s, *left) {
                let mut looked = s.clone();
                let mut next = Worker::Settling(batch, Settling { marks: *left, step: Some(Step::New), by });
                if self.leaves(s) {
                    self.remember(&mut looked, *left);
                    next = self.marked(batch);
                }
                all.push(("looks an atomic add up", looked, next));
            }
        }
        all
    }

    /// How a worker may begin to settle *marks*: with any of them.
    fn ways(&self, s: &State, marks: Marks) -> Vec<By> {
        let Some(decided) = s.decided[0] else { return vec![By::Worker] };
        if self.breaks(Rule::DecidedMarkEnds) && self.scenario.full_marks {
            return vec![By::WorkerThatFound];
        }
        let sight = Sight::of(decided);
        if !self.scenario.full_marks {
            return vec![By::WorkerThatAdopts(sight)];
        }
        let mut ways = Vec::new();
        for each in [Sight::Decision, Sight::Cancel] {
            if marks.of(each).has_any() && (each == sight || self.breaks(Rule::DecidedMarkNames)) {
                ways.push(By::WorkerThatAdopts(each));
            }
        }
        if ways.is_empty() || self.lacking(marks, sight).has_any() {
            ways.push(By::WorkerThatFound);
        }
        ways
    }

    /// The windows whose marks do not name the decision.
    fn lacking(&self, marks: Marks, sight: Sight) -> Times {
        if !self.scenario.full_marks {
            return Times::default();
        }
        if self.breaks(Rule::DecidedMarkNames) {
            let mut windows = marks.lacking(Sight::Decision);
            windows.remove(marks.of(Sight::Cancel));
            return windows;
        }
        marks.lacking(sight)
    }

    /// Whether a worker leaves an atomic add as it is.
    fn leaves(&self, s: &State) -> bool {
        let leaves = match self.find(s, 0) {
            Events::All => s.decided[0].is_none() || self.breaks(Rule::DecisionLookedUp),
            Events::Some => self.breaks(Rule::HalvesSettled),
            Events::None => self.breaks(Rule::NothingFoundSettled),
        };
        let is_cancelled = s.decided[0].map_or(false, Outcome::is_cancelled);
        let leaves = leaves || is_cancelled && self.breaks(Rule::CancelEndedByWorker);
        leaves || self.is_missing(s, self.scenario.tokens[0])
    }

    /// `Resolver.resolve` for an atomic add.
    fn settle(&self, s: &State, batch: Batch, settling: Settling) -> Vec<Next> {
        let Settling { marks, by, .. } = settling;
        let step = settling.step.expect("it was looked up");
        self.resolve(s, 0, step, by)
            .into_iter()
            .map(|(what, mut state, next)| {
                let is_settled = what == "has settled the atomic add";
                let going =
                    |step: Step, by: By| Worker::Settling(batch, Settling { marks, step: Some(step), by });
                let worker = match (next, by) {
                    (Step::Over, By::WorkerThatAdopts(sight))
                        if is_settled && self.lacking(marks, sight).has_any() =>
                    {
                        going(Step::New, By::WorkerThatFound)
                    }
                    (Step::Over, _) if is_settled => {
                        self.remember(&mut state, marks);
                        self.marked(batch)
                    }
                    (Step::Over, _) if what == STOPS_HALF_MARKED => Worker::Idle,
                    (Step::Over, _) => self.before_pending(&state, batch, marks),
                    // It was cancelled after the look-up.
                    (Step::Decided(outcome), By::WorkerThatAdopts(sight))
                        if matches!(step, Step::Proposing(_))
                            && self.scenario.full_marks
                            && sight != Sight::of(outcome)
                            && !self.breaks(Rule::DecidedMarkNames)
                            && !self.breaks(Rule::AdoptedCompared) =>
                    {
                        going(Step::Proposing(outcome), By::WorkerThatFound)
                    }
                    _ => going(next, by),
                };
                (what, state, worker)
            })
            .collect()
    }

    /// An atomic add that may be in flight delays its window and later ones, not earlier ones.
    fn before_pending(&self, s: &State, batch: Batch, marks: Marks) -> Worker {
        if self.breaks(Rule::SettledBeforeSummed) {
            return self.marked(batch);
        }
        match marks.all().first() {
            Some(window) if window - 1 > s.watermarks[batch.shard] => {
                self.marked(self.dirty(s, batch.shard, window - 1, batch.dropped_before))
            }
            _ => Worker::Idle,
        }
    }

    /// `BatchRoller._roll_once`, its first half: heads, plans and rows.
    fn plan_all(&self, s: &State, batch: Batch) -> Next {
        let mut state = s.clone();
        if self.breaks(Rule::CountersBeforeWatermark) {
            self.move_watermark(&mut state, batch.shard, batch.through);
        }
        if self.breaks(Rule::MarksUntilPassed) {
            self.drop_marks(&mut state, batch.shard, batch.through);
        }
        let mut plans = [None; TWO];
        for at in (0..TWO).filter(|at| self.shard_of(*at) == batch.shard) {
            if (0..TWO).any(|window| batch.adds[at][window] || batch.recounts[at][window])
                || s.counters[at]
                    .recounts
                    .iter()
                    .any(|left| left.between(s.watermarks[batch.shard], batch.through).has_any())
            {
                plans[at] = self.plan(s, at, &batch);
            }
        }
        if plans == [None; TWO] {
            return ("has no marks", state, Worker::Advancing(batch.shard, batch.through));
        }
        let next = if plans.iter().flatten().any(|plan| plan.whole) {
            Worker::Headed(batch, plans)
        } else {
            Worker::Planned(batch, plans)
        };
        ("reads heads", state, next)
    }

    /// `read_partitions`: of counters that are folded as a whole, rows, and then the heads again.
    fn read_rows(&self, s: &State, batch: Batch, plans: [Option<Plan>; TWO]) -> Next {
        let mut read = plans;
        for (plan, counter) in read.iter_mut().zip(&s.counters) {
            let Some(plan) = plan.as_mut().filter(|plan| plan.whole) else { continue };
            if counter.head.settled.0 != plan.head.settled.0 && !self.breaks(Rule::HeadReadAgain) {
                // The heads that were read again are those to begin with.
                return ("begins again with the heads", s.clone(), Worker::Marked(batch));
            }
            plan.rows = counter.rows;
        }
        ("reads rows", s.clone(), Worker::Planned(batch, read))
    }

    /// `plan` in rollup/roller.py.
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
            let is_kept = time >= batch.dropped_before && settled.0 < time;
            let is_known = time <= target && (is_kept || self.breaks(Rule::DroppedWindowsLeft));
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
        Some(Plan { head: s.counters[at].head, rows: [None; TWO], sums, whole, settles })
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
            let is_kept = time >= dropped_before && settled < time;
            let is_known = time <= through && (is_kept || self.breaks(Rule::DroppedWindowsLeft));
            wanted[window] = pending[window].has_any() && is_known;
        }
        wanted
    }

    /// `EventStore.sums`, and `update` in rollup/roller.py.
    fn sum(&self, s: &State, batch: Batch, plans: [Option<Plan>; TWO]) -> Next {
        let gone = |plan: &Plan| self.windows().any(|(at, time)| plan.sums[at] && self.is_missing(s, time));
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
            for (row, fresh) in plan.rows.iter().zip(fresh) {
                let before = row.unwrap_or_default();
                count = count.plus(fresh.unwrap_or(before)).minus(before);
            }
        } else if plan.whole {
            let from = head.settled.1;
            count = from;
            let through = batch.dropped_before - 1;
            let mut old = from;
            let mut in_order: Vec<_> = self.windows().collect();
            if self.breaks(Rule::RowsInOrder) {
                in_order.sort_by_key(|(window, _)| fresh[*window].is_some());
            }
            for (window, time) in in_order {
                let is_settled = time <= head.settled.0 && !self.breaks(Rule::SettledRowsLeft);
                let row = plan.rows[window].filter(|_| !is_settled && time <= target);
                let row = row.filter(|_| !self.breaks(Rule::RecountFoldsAllRows));
                let row = fresh[window].or(row).unwrap_or_default();
                count = count.plus(row);
                if time <= through {
                    old = old.plus(row);
                }
            }
            settled = plan.settles.then_some((through, old.without_clear()));
        } else {
            count = fresh.iter().flatten().fold(count, |count, row| count.plus(*row));
        }
        let pending_done = self.pending_done(head, batch, target);
        if self.breaks(Rule::ClearInRow) {
            fresh = fresh.map(|row| row.map(Count::without_clear));
        }
        let checkpoint = (target, count.without_clear());
        Update { rows: fresh, checkpoint, settled, pending_done, is_written: false }
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

    /// `fold_events`: what the events of a window add to a counter. All are of one instant.
    pub fn sum_of(&self, s: &State, counter: usize, window: usize) -> Count {
        let mut count = Count::default();
        for item in &self.items {
            if item.counter == counter && item.window == window && s.landed[item.at] {
                let is_clear = self.is_clear(item);
                count.0[item.at] += i8::from(!is_clear);
                count.1 |= is_clear;
            }
        }
        if count.1 && !self.breaks(Rule::ClearNotLater) {
            count.0 = [0; TWO];
        }
        count
    }

    /// `RollupStore.apply`: counter by counter. A batch is cut off where its worker stops, and of
    /// the last counter one replica may have all of it: then a read of the head repairs the head
    /// alone, and a read of the rows repairs the rows alone.
    fn apply(&self, s: &State, batch: Batch, updates: [Option<Update>; TWO]) -> Vec<Next> {
        let at = (0..TWO).find(|at| updates[*at].is_some()).expect("a counter is left to be written");
        let mut left = updates;
        let update = left[at].take().unwrap();
        let has_done = update.pending_done.iter().any(|done| done.has_any());
        let has_done = has_done || self.breaks(Rule::PendingOnlyWhenRead);
        if has_done && !update.is_written && !self.breaks(Rule::PendingAfterRows) {
            left[at] =
                Some(Update { pending_done: update.pending_done, is_written: true, ..Default::default() });
        }
        let then = match left {
            [None, None] => Worker::Advancing(batch.shard, batch.through),
            _ => Worker::Summed(batch, left),
        };
        if update.is_written {
            let mut removed = s.clone();
            self.remove_pending(&mut removed, at, &update);
            return vec![("removes the recounts that are done", removed, then)];
        }
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
            next.push(("writes a counter", whole, then));
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
        if self.breaks(Rule::PendingAfterRows) {
            self.remove_pending(s, at, update);
        }
        self.write_settled(s, at, batch, update);
    }

    /// Only when the rows are on enough replicas: a reader that must fold them for another recount
    /// may see that these are removed, and the rows as they were.
    fn remove_pending(&self, s: &mut State, at: usize, update: &Update) {
        let counter = &mut s.counters[at];
        for window in 0..TWO {
            let mut done = update.pending_done[window];
            if self.breaks(Rule::PendingOnlyWhenRead) {
                done = counter.head.pending[window];
            }
            counter.head.pending[window].remove(done);
            counter.removed[window] = counter.removed[window].with(done);
        }
    }

    fn write_rows(&self, s: &mut State, at: usize, batch: &Batch, update: &Update, wins: bool) {
        for (window, time) in self.windows() {
            let replaces = self.replaces(batch, s.counters[at].row_stamps[window], wins);
            let is_settled = update.settled.map_or(false, |settled| time <= settled.0);
            if update.rows[window].is_some() && replaces && !is_settled {
                s.counters[at].rows[window] = update.rows[window];
                s.counters[at].row_stamps[window] = batch.reaches;
            }
        }
        self.write_settled(s, at, batch, update);
    }

    /// What is settled, and the deletion of its rows: all the rows that older batches wrote.
    fn write_settled(&self, s: &mut State, at: usize, batch: &Batch, update: &Update) {
        if let Some(settled) = update.settled {
            for (window, time) in self.windows() {
                let counter = &mut s.counters[at];
                if time <= settled.0 && counter.row_stamps[window] < batch.reaches {
                    counter.rows[window] = None;
                    counter.row_stamps[window] = batch.reaches - 1;
                }
            }
            // Its timestamp is its own instant.
            if settled.0 > s.counters[at].head.settled.0 {
                s.counters[at].head.settled = settled;
            }
        }
    }

    /// `RollupStore.advance`, then `drop_marks`.
    fn advance(&self, s: &State, shard: usize, through: Time) -> Next {
        let mut state = s.clone();
        self.move_watermark(&mut state, shard, through);
        ("moves the watermark", state, Worker::Idle)
    }

    /// A watermark never moves back. The marks up to it are never read again, so they are dropped
    /// here; that a worker drops them later, or a crash leaves them, makes no difference.
    fn move_watermark(&self, s: &mut State, shard: usize, through: Time) {
        let watermark = s.watermarks[shard].max(through);
        s.watermarks[shard] = watermark;
        self.drop_marks(s, shard, watermark);
    }

    fn drop_marks(&self, s: &mut State, shard: usize, through: Time) {
        let ours = s.counters.iter_mut().enumerate().filter(|(at, _)| self.shard_of(*at) == shard);
        for (_, counter) in ours {
            for (window, time) in self.windows() {
                counter.marks[window] &= time > through;
                counter.recounts[window] = counter.recounts[window].between(through, 31);
            }
        }
        s.atomic_marks[shard] = s.atomic_marks[shard].between(through, 31);
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
            if reading < due || needs_watermark && s.watermarks[0] < due {
                continue;
            }
            let mut state = s.clone();
            let what = match (s.retired, s.dropped_before, s.table_gone) {
                (None, _, _) => {
                    state.retired = Some(reading);
                    "retires the slice"
                }
                (_, before, gone) if before < end && (gone || !self.breaks(Rule::DroppedBeforeFirst)) => {
                    state.dropped_before = end;
                    "moves dropped_before"
                }
                (_, _, false) => {
                    self.drop_table(&mut state);
                    "drops the table"
                }
                _ => continue,
            };
            out.push((("maintenance", what), state));
        }
    }
}
