//! Requests: the path of an add (counter/core/write.py), and late tokens (counter/core/resolve.py).

use super::state::{Asker, By, Events, Outcome, Sight, State, Step, Store, Time, TWO};
use super::{Item, Log, FUTURE_LIMIT, WINDOW, WRITE_TIMEOUT};
use crate::checker::Label;
use crate::rules::Rule;

type Next = (&'static str, State, Step);

/// The step after which a resolver takes no more.
pub const STOPS_HALF_MARKED: &str = "marks its atomic add again in one shard, and stops";

impl Log {
    /// Append the steps of request *at*. It may stop anywhere: then it takes no more steps.
    pub fn request_steps(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let token = self.token_of(at);
        let (who, next) = if at >= self.scenario.requests.len() {
            ("cancel", self.resolve(s, token, s.requests[at], By::Cancel))
        } else {
            let mut next = self.write(s, token, s.requests[at]);
            next.extend(self.resolve(s, token, s.requests[at], By::Client));
            ("request", next)
        };
        for (what, mut state, step) in next {
            state.requests[at] = step;
            out.push(((who, what), state));
        }
    }

    /// The token of request *at*: of a cancel, the first one.
    pub fn token_of(&self, at: usize) -> usize {
        self.scenario.requests.get(at).copied().unwrap_or(0)
    }

    /// `EventWriter.is_late`; None if the token is too far in the future.
    fn is_late(&self, token: usize, reading: Time) -> Option<bool> {
        let time = self.scenario.tokens[token];
        (time - reading <= FUTURE_LIMIT).then(|| time < reading - self.scenario.accept_limit)
    }

    /// `CounterService._submit`, `EventWriter.write_admitted`: mark, age check, event, deadline.
    ///
    /// A token that has become late after its mark is resolved: as one that arrives late.
    fn write(&self, s: &State, token: usize, step: Step) -> Vec<Next> {
        let mut next = Vec::new();
        match step {
            Step::New if self.is_gone(s, self.scenario.tokens[token]) => {}
            Step::New => {
                // It may have arrived at any earlier time, and waited until now.
                let mut marked = s.clone();
                if !self.breaks(Rule::MarkBeforeEvent) {
                    self.mark(&mut marked, token);
                }
                next.push(("arrives, and has its mark", marked, Step::Marked));
            }
            Step::Marked => {
                for reading in self.readings(s.now) {
                    match self.is_late(token, reading) {
                        Some(true) if !self.breaks(Rule::SecondAgeCheck) => {}
                        None => {}
                        _ if self.breaks(Rule::DeadlineClockFirst) => {
                            next.push(("is young enough", s.clone(), Step::Checked))
                        }
                        _ => next.push(self.send(s, token)),
                    }
                }
            }
            Step::Checked => next.push(self.send(s, token)),
            Step::Sent(began) => {
                let mut landed = s.clone();
                let in_time = s.now - began <= WRITE_TIMEOUT;
                if (in_time || self.breaks(Rule::Deadline)) && self.land(&mut landed, token) {
                    landed.acknowledged[token] = true;
                    landed.contradicted |= landed.cancelled[token].is_some();
                    next.push(("its event lands, and it is acknowledged", landed, Step::Over));
                }
            }
            _ => {}
        }
        next
    }

    /// `EventWriter._mark`.
    pub fn mark(&self, s: &mut Store, token: usize) {
        let time = self.scenario.tokens[token];
        for item in self.items_of(token) {
            // Another one is never read.
            if time > s.watermarks[self.shard_of(item.counter)] {
                s.counters[item.counter].marks[item.window] = true;
            }
        }
        if self.scenario.atomic && !self.breaks(Rule::AtomicMark) {
            for shard in self.shards_marked() {
                if time > s.watermarks[shard] {
                    s.atomic_marks[shard].add(Sight::Nothing, time);
                }
            }
        }
    }

    /// The shards that have an item of the atomic add.
    fn shards_marked(&self) -> std::ops::Range<usize> {
        0..if self.breaks(Rule::AtomicMarkEverywhere) { 1 } else { self.scenario.shards }
    }

    /// `SeparateWrites.mark_atomic`: with `full_marks` the mark may land at any time from now on, or
    /// never, in each shard by itself. It is not read if the watermark has passed its window.
    fn send_mark(&self, s: &mut State, window: Time, sight: Sight) {
        for shard in self.shards_marked() {
            if window > s.watermarks[shard] {
                let is_late = self.scenario.full_marks;
                let marks = if is_late { &mut s.marks_sent[shard] } else { &mut s.atomic_marks[shard] };
                marks.add(sight, window);
            }
        }
    }

    /// The shards that a mark of an atomic add may reach alone, if it is not one in flight.
    fn shards_apart(&self) -> std::ops::Range<usize> {
        0..if self.scenario.shards > 1 && !self.scenario.full_marks { self.scenario.shards } else { 0 }
    }

    fn is_mark_in_flight(&self, s: &State, window: Time, sight: Sight) -> bool {
        s.marks_sent.iter().any(|sent| sent.of(sight).has(window))
    }

    /// All marks land.
    pub fn land_marks(&self, s: &mut State) {
        for shard in 0..TWO {
            let sent = std::mem::take(&mut s.marks_sent[shard]);
            s.atomic_marks[shard] = s.atomic_marks[shard].with(sent.between(s.watermarks[shard], 31));
        }
    }

    /// The event is sent. From now on it may land at any time, or never.
    ///
    /// The deadline begins just before the age is checked. A pause between the two only makes it
    /// stricter, so they are one step.
    fn send(&self, s: &State, token: usize) -> Next {
        let mut sent = s.clone();
        for item in self.items_of(token) {
            sent.sent[item.at] = true;
        }
        ("sends its event", sent, Step::Sent(s.now))
    }

    /// All the events of a token land. Returns whether they can: not if their table is gone.
    fn land(&self, s: &mut State, token: usize) -> bool {
        for item in self.items_of(token) {
            s.landed[item.at] = !s.hidden[item.at];
        }
        !self.is_gone(s, self.scenario.tokens[token])
    }

    /// `EventStore.find`.
    pub fn find(&self, s: &State, token: usize) -> Events {
        let items = self.items_of(token);
        match items.iter().filter(|item| s.landed[item.at]).count() {
            0 => Events::None,
            some if some < items.len() => Events::Some,
            _ => Events::All,
        }
    }

    /// `Resolver.resolve`. It raises `TokenPendingError`, or `TokenTooOldError` with
    /// `applied=None`, by going to `Over`.
    pub fn resolve(&self, s: &State, token: usize, step: Step, by: By) -> Vec<Next> {
        let mut next = Vec::new();
        match step {
            Step::New | Step::Looked(_) => {
                for reading in self.readings(s.now) {
                    if by != By::Client || self.is_late(token, reading) == Some(true) {
                        next.push(self.look_up(s, token, step, reading, by));
                    }
                }
            }
            Step::Proposing(outcome) => {
                let is_marked = match by {
                    By::Client => !self.breaks(Rule::AtomicMarkAgain),
                    By::Cancel if self.breaks(Rule::CancelMarkedAgain) => {
                        s.decided[token].map_or(true, Outcome::is_cancelled)
                    }
                    By::Cancel => !self.breaks(Rule::CancelMarked),
                    By::Worker => !self.breaks(Rule::AtomicMarkByWorker),
                    By::WorkerThatFound => !self.breaks(Rule::DecidedMark),
                    By::WorkerThatAdopts(_) => false,
                };
                if !(self.scenario.atomic && is_marked) {
                    next.push(self.decide(s, token, outcome, by));
                    return next;
                }
                for reading in self.readings(s.now) {
                    let mut sent = s.clone();
                    self.send_mark(&mut sent, reading, self.first_sight(s, token, by));
                    next.push(("marks its atomic add again", sent, Step::Marking(outcome, reading)));
                    for shard in self.shards_apart() {
                        let mut some = s.clone();
                        if reading > s.watermarks[shard] {
                            some.atomic_marks[shard].add(Sight::Nothing, reading);
                        }
                        next.push((STOPS_HALF_MARKED, some, Step::Over));
                    }
                }
            }
            Step::Marking(outcome, window)
                if !self.is_mark_in_flight(s, window, self.first_sight(s, token, by)) =>
            {
                let found = by == By::WorkerThatFound;
                let names_first = found && self.breaks(Rule::DecidedMarkInTime);
                for reading in self.readings(s.now) {
                    let (what, mut decided, mut step) = self.decide(s, token, outcome, by);
                    if !(self.is_mark_in_time(window, reading) || names_first) {
                        let again = Step::Proposing(outcome);
                        next.push(("decides, but its mark may have been passed", decided, again));
                        continue;
                    }
                    if let Step::Decided(adopted) = step {
                        if found && !self.breaks(Rule::DecidedMarkTwice) {
                            self.send_mark(&mut decided, window, Sight::of(adopted));
                            step = Step::Naming(adopted, window);
                        }
                    }
                    next.push((what, decided, step));
                }
            }
            Step::Naming(outcome, window) if !self.is_mark_in_flight(s, window, Sight::of(outcome)) => {
                let is_late = |reading| !self.is_mark_in_time(window, reading);
                if self.breaks(Rule::DecidedMarkInTime) && self.readings(s.now).any(is_late) {
                    let again = Step::Proposing(outcome);
                    next.push(("names the decision, but its mark may have been passed", s.clone(), again));
                } else {
                    next.extend(self.enforce(s, token, outcome));
                }
            }
            Step::Marking(..) | Step::Naming(..) => {}
            Step::Decided(outcome) => next.extend(self.enforce(s, token, outcome)),
            _ => next.extend(self.request_recounts(s, token, step, by)),
        }
        next
    }

    fn is_mark_in_time(&self, window: Time, reading: Time) -> bool {
        self.is_surely_open(window, reading) || self.breaks(Rule::AtomicMarkLeftAgain)
    }

    /// The sight of the first mark of a resolver.
    fn first_sight(&self, s: &State, token: usize, by: By) -> Sight {
        match s.decided[token] {
            Some(outcome) if by == By::WorkerThatFound && self.breaks(Rule::DecidedMarkTwice) => {
                Sight::of(outcome)
            }
            _ => Sight::Nothing,
        }
    }

    /// The clock, then the event. A pause between the two makes no difference: the same is found
    /// with a clock that is read after the pause.
    fn look_up(&self, s: &State, token: usize, step: Step, reading: Time, by: By) -> Next {
        let closed = reading >= self.closes_at(self.scenario.tokens[token]);
        let (wait, clock_first) = match by {
            By::Cancel => (Rule::CancelWaits, Rule::CancelClockFirst),
            _ => (Rule::WaitUntilClosed, Rule::ClockBeforeLookUp),
        };
        let closed = closed || self.breaks(wait);
        if matches!(by, By::Client | By::Cancel)
            && self.is_past_retention(token, reading, self.deciding_time())
        {
            return ("is past retention", s.clone(), Step::Over);
        }
        match step {
            Step::Looked(found) => self.propose(s, found, closed, by),
            _ if self.is_missing(s, self.scenario.tokens[token]) => ("finds no table", s.clone(), Step::Over),
            _ if self.breaks(clock_first) => {
                ("looks its event up", s.clone(), Step::Looked(self.find(s, token)))
            }
            _ => self.propose(s, self.find(s, token), closed, by),
        }
    }

    /// A cancel waits even if its event is found: another attempt may be acknowledged until then.
    fn propose(&self, s: &State, found: Events, closed: bool, by: By) -> Next {
        if (found != Events::All || by == By::Cancel) && !closed {
            return ("gets Retry-After, its window is open", s.clone(), Step::Over);
        }
        let outcome = match found {
            _ if by == By::Cancel => Outcome::Cancelled(found != Events::None),
            Events::None => Outcome::Void,
            _ => Outcome::Applied,
        };
        ("is late, and looks its event up", s.clone(), Step::Proposing(outcome))
    }

    /// `DecisionStore.decide`: insert if not exists. A cancel replaces `applied` and `void` by
    /// compare-and-set. The two are one step, because only another cancel can come in between.
    fn decide(&self, s: &State, token: usize, outcome: Outcome, by: By) -> Next {
        let mut decided = s.clone();
        let first = s.decided[token];
        let kept = |was_counted: bool, rule: Rule| {
            if self.breaks(rule) {
                outcome
            } else {
                Outcome::Cancelled(was_counted)
            }
        };
        let adopted = match (first, by) {
            (Some(Outcome::Applied), By::Cancel) => kept(true, Rule::CancelledWasApplied),
            (Some(Outcome::Void), By::Cancel) => kept(false, Rule::CancelledWasVoid),
            (Some(Outcome::Cancelled(was_counted)), By::Cancel) => kept(was_counted, Rule::CancelledOnce),
            (Some(first), _) => first,
            (None, _) => outcome,
        };
        decided.decided[token] = Some(adopted);
        let adopted = if self.breaks(Rule::FirstDecisionIsFinal) { outcome } else { adopted };
        decided.contradicted |= !adopted.is_cancelled() && s.cancelled[token].is_some();
        let ends = if by == By::Cancel { Rule::CancelEndedByCancel } else { Rule::CancelEndedByResolver };
        if first.map_or(false, Outcome::is_cancelled) && self.breaks(ends) {
            return self.answer(&decided, token, adopted, s.now, by);
        }
        ("decides, or adopts the decision", decided, Step::Decided(adopted))
    }

    /// `SeparateWrites.rewrite` or `SeparateWrites.void`: of the items in order, one after the other.
    fn enforce(&self, s: &State, token: usize, outcome: Outcome) -> Vec<Next> {
        let mut enforced = s.clone();
        if self.is_gone(s, self.scenario.tokens[token]) {
            return vec![("finds no table", enforced, Step::Over)];
        }
        let is_applied = outcome == Outcome::Applied;
        let shows = is_applied && self.breaks(Rule::HiddenWins);
        let is_done = |s: &State, item: &Item| s.hidden[item.at] && !shows || is_applied && s.landed[item.at];
        let skips = match outcome {
            Outcome::Applied => Rule::RewriteOnApplied,
            Outcome::Void => Rule::TombstoneOnVoid,
            Outcome::Cancelled(_) => Rule::CancelHides,
        };
        let left = self.items_of(token).iter().find(|item| !is_done(s, item) && !self.breaks(skips));
        if let Some(item) = left {
            enforced.landed[item.at] = is_applied;
            enforced.sent[item.at] |= is_applied;
            enforced.hidden[item.at] = !is_applied;
        }
        let what = match (left, is_applied) {
            (None, _) => "has nothing to write",
            (_, true) => "writes an item again",
            (_, false) => "hides an item",
        };
        let is_last = self.breaks(skips) || self.items_of(token).iter().all(|item| is_done(&enforced, item));
        vec![(what, enforced, if is_last { Step::Enforced(outcome) } else { Step::Decided(outcome) })]
    }

    /// `Resolver.request_recounts`, and then the answer.
    fn request_recounts(&self, s: &State, token: usize, step: Step, by: By) -> Vec<Next> {
        let mut next = Vec::new();
        let is_recounted = |outcome: Outcome| !(outcome.is_cancelled() && self.breaks(Rule::CancelRecounts));
        match step {
            Step::Enforced(outcome) => {
                for reading in self.readings(s.now) {
                    let mut left = s.clone();
                    let is_pending = !(outcome.is_cancelled() && self.breaks(Rule::CancelPending));
                    if !self.breaks(Rule::RecountForReaders) && is_pending && is_recounted(outcome) {
                        for item in self.items_of(token) {
                            let counter = &mut left.counters[item.counter];
                            let mut pending = counter.head.pending[item.window];
                            pending.add(reading);
                            pending.remove(counter.removed[item.window]);
                            counter.head.pending[item.window] = pending;
                        }
                    }
                    next.push(("leaves a recount for readers", left, Step::Left(outcome, reading)));
                }
            }
            Step::Left(outcome, window) => {
                let mut left = s.clone();
                let time = self.scenario.tokens[token];
                let marked = if self.breaks(Rule::RecountInOpenWindow) { time } else { window };
                for item in self.items_of(token) {
                    let is_read = marked > s.watermarks[self.shard_of(item.counter)];
                    if is_read && !self.breaks(Rule::RecountForWorker) && is_recounted(outcome) {
                        left.counters[item.counter].recounts[item.window].add(marked);
                    }
                }
                // A pause before the clock is read only leads to more recounts.
                for reading in self.readings(s.now) {
                    if self.is_surely_open(window, reading) || self.breaks(Rule::RecountLeftAgain) {
                        next.push(self.answer(&left, token, outcome, reading, by));
                    } else {
                        next.push(("took too long to leave recounts", left.clone(), Step::Enforced(outcome)));
                    }
                }
            }
            _ => {}
        }
        next
    }

    /// `CounterService.recount`: `POST .../recount` of the first window.
    pub fn asker_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, asker: Asker, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.asker = asker;
            change(&mut next);
            out.push((("client", what), next));
        };
        match s.asker {
            Asker::New if s.counters[0].rows[0].is_some() && s.dropped_before <= self.scenario.tokens[0] => {
                push("finds a row to be counted again", Asker::Found, &|_| {});
            }
            Asker::Found => {
                // That it may have to be left again is what a resolver has, too.
                for window in self.readings(s.now).filter(|window| *window > s.watermarks[0]) {
                    push("asks for a recount", Asker::Over, &|next| {
                        next.counters[0].recounts[0].add(window);
                    });
                }
            }
            _ => {}
        }
    }

    /// Whether no worker can have passed *window* yet, by the clock of a resolver.
    fn is_surely_open(&self, window: Time, reading: Time) -> bool {
        reading <= window + WINDOW + self.scenario.accept_limit
    }

    fn answer(&self, s: &State, token: usize, outcome: Outcome, reading: Time, by: By) -> Next {
        let mut answered = s.clone();
        if !matches!(by, By::Client | By::Cancel) {
            return ("has settled the atomic add", answered, Step::Over);
        }
        if self.is_past_retention(token, reading, WINDOW + 2 * self.scenario.skew) {
            return ("is past retention", answered, Step::Over);
        }
        match outcome {
            Outcome::Applied => answered.acknowledged[token] = true,
            Outcome::Void => answered.refused[token] = true,
            Outcome::Cancelled(was_counted) => {
                let first = *answered.cancelled[token].get_or_insert(was_counted);
                answered.contradicted |= first != was_counted;
            }
        }
        ("is answered by the decision", answered, Step::Over)
    }

    /// `Resolver._check_retention`.
    fn is_past_retention(&self, token: usize, reading: Time, margin: Time) -> bool {
        let margin = if self.breaks(Rule::DecidingMargin) { 0 } else { margin };
        match self.scenario.retention {
            Some(retention) => self.scenario.tokens[token] < reading - retention + margin,
            None => false,
        }
    }

    /// Writes that are in flight, and what the store does by itself.
    pub fn store_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        for shard in 0..self.scenario.shards {
            for sight in [Sight::Nothing, Sight::Decision, Sight::Cancel] {
                for window in s.marks_sent[shard].of(sight).all() {
                    let mut landed = s.clone();
                    landed.atomic_marks[shard].add(sight, window);
                    out.push((("store", "a mark lands"), landed));
                }
            }
        }
        for Item { at: item, time, .. } in &self.items {
            let item = *item;
            if s.sent[item] && !s.landed[item] && !s.hidden[item] && !self.is_gone(s, *time) {
                let mut landed = s.clone();
                landed.landed[item] = true;
                out.push((("store", "a write of an event lands"), landed));
            }
            let is_cancelled = s.decided[0].map_or(false, Outcome::is_cancelled);
            if is_cancelled && self.breaks(Rule::CancelledStays) {
                let mut expired = s.clone();
                expired.decided[0] = None;
                out.push((("store", "a decision expires"), expired));
            }
            if s.hidden[item] && self.breaks(Rule::TombstoneStays) {
                let mut purged = s.clone();
                purged.hidden[item] = false;
                out.push((("store", "purges a tombstone"), purged));
            }
        }
    }
}
