//! The protocol over a store without transactions: Cassandra, and the memory store of the tests.

mod canonical;
mod reader;
mod request;
mod scenarios;
mod state;
pub mod traces;
mod worker;

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;
pub use scenarios::{Scenario, SCENARIOS};
use state::{
    Asker, By, Events, Marks, Outcome, Reader, Settling, Sight, State, Step, Store, Time, Worker, TWO,
};

const WINDOW: Time = 1;
const WRITE_TIMEOUT: Time = 1;
const FUTURE_LIMIT: Time = 1;
const STEPS_OF_A_PASS_MAX: usize = 50;

/// An event: the token and the counter that it belongs to, and its window.
struct Item {
    at: usize,
    token: usize,
    time: Time,
    counter: usize,
    window: usize,
}

/// A scenario, and the rule that is broken in it, if any.
pub struct Log {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
    items: Vec<Item>,
    of_token: Vec<Vec<Item>>,
}

impl Log {
    pub fn new(scenario: &'static Scenario, broken: Option<Rule>) -> Log {
        let items = || {
            let of_atomic =
                (0..TWO).map(|at| Item { at, token: 0, time: scenario.tokens[0], counter: at, window: 0 });
            let first = |time: &Time| scenario.tokens.iter().position(|each| each == time).unwrap();
            let single = scenario.tokens.iter().enumerate();
            let single =
                single.map(|(at, time)| Item { at, token: at, time: *time, counter: 0, window: first(time) });
            if scenario.atomic {
                of_atomic.collect()
            } else {
                single.collect::<Vec<_>>()
            }
        };
        let of_token = (0..scenario.tokens.len())
            .map(|token| items().into_iter().filter(|item| item.token == token).collect())
            .collect();
        Log { scenario, broken, items: items(), of_token }
    }

    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn shard_of(&self, counter: usize) -> usize {
        counter % self.scenario.shards
    }

    fn items_of(&self, token: usize) -> &[Item] {
        &self.of_token[token]
    }

    fn is_clear(&self, item: &Item) -> bool {
        self.scenario.clear == Some(item.token)
    }

    /// The clear that erases *item*, if there is one: it is not earlier.
    fn clear_of(&self, item: &Item) -> Option<&Item> {
        let erases = |each: &&Item| self.is_clear(each) && item.time <= each.time;
        self.items.iter().find(erases)
    }

    /// The windows that have events: their numbers and times.
    fn windows(&self) -> impl Iterator<Item = (usize, Time)> + '_ {
        let tokens = self.scenario.tokens;
        let is_first = move |at: usize| !tokens[..at].contains(&tokens[at]);
        (0..tokens.len()).filter(move |at| is_first(*at)).map(move |at| (at, tokens[at]))
    }

    /// The end of the slice that is dropped.
    fn slice_end(&self) -> Time {
        self.scenario.slice_end.unwrap_or(self.scenario.tokens.iter().max().unwrap() + 1)
    }

    /// Whether the table with the events of *time* is gone.
    fn is_gone(&self, s: &State, time: Time) -> bool {
        s.table_gone && time < self.slice_end()
    }

    /// Whether a read of the events of *time* raises `SliceMissingError`.
    fn is_missing(&self, s: &State, time: Time) -> bool {
        self.is_gone(s, time) && !self.breaks(Rule::SliceMissing)
    }

    /// Whether `was_counted` agrees with what clients were answered and with what was stored.
    fn was_counted_right(&self, before: &State, s: &State, token: usize) -> bool {
        match s.decided[token] {
            Some(Outcome::Cancelled(true)) => {
                let is_new = before.decided[token] != s.decided[token];
                let is_in_count = self.find(before, token) != Events::None
                    || before.decided[token] == Some(Outcome::Applied);
                !s.refused[token] && (!is_new || is_in_count)
            }
            Some(Outcome::Cancelled(false)) => !s.acknowledged[token],
            _ => true,
        }
    }

    fn drop_table(&self, s: &mut State) {
        s.table_gone = true;
        for item in &self.items {
            s.landed[item.at] &= item.time >= self.slice_end();
        }
    }

    /// What the clock of any process may show: `ClockGuard` holds it within the bound.
    fn readings(&self, now: Time) -> std::ops::RangeInclusive<Time> {
        let skew = self.scenario.skew;
        if now > self.scenario.horizon {
            return now..=now; // What comes after the scenario is calm.
        }
        let off = if self.breaks(Rule::ClockGuard) { skew + 2 } else { skew };
        (now - off).max(0)..=now + off
    }

    /// `closing_lag` in counter/windows.py, and the accept limit.
    fn lag(&self) -> Time {
        let skews = match self.broken {
            Some(Rule::SkewInClosing) => 0,
            Some(Rule::SkewTwiceInClosing) => 1,
            _ => 2,
        };
        let limit = if self.breaks(Rule::AcceptLimitInClosing) { 0 } else { self.scenario.accept_limit };
        let timeout = if self.breaks(Rule::WriteTimeoutInClosing) { 0 } else { WRITE_TIMEOUT };
        limit + timeout + skews * self.scenario.skew
    }

    /// `closes_at`.
    fn closes_at(&self, time: Time) -> Time {
        time + WINDOW + self.lag()
    }

    /// `closed_through`.
    fn closed_through(&self, reading: Time) -> Time {
        reading - self.lag() - WINDOW
    }

    /// `deciding_time`.
    fn deciding_time(&self) -> Time {
        2 * (WINDOW + self.lag() + self.scenario.skew)
    }

    /// Everything stops; then a worker with a right clock finishes, retention runs out, and later
    /// adds have the counters rolled up twice more. Returns the promise that is broken after one of
    /// these. *last*: of equal timestamps, an older write wins.
    fn broken_at_end(&self, s: &State, last: bool) -> Option<&'static str> {
        const COUNTS: Option<&str> =
            Some("when all is quiet, and after retention, the count is the sum of the adds that count");
        let Some(mut s) = self.quiet(s, last) else { return COUNTS };
        let is_whole = !self.scenario.atomic || self.read(&s, 0).0[0] == self.read(&s, 1).0[1];
        if !is_whole || !self.reads_right(&s) {
            return COUNTS;
        }
        if !self.marks_end(&s, last) {
            return Some("when all is quiet, workers leave no more marks of an atomic add");
        }
        s.dropped_before = self.slice_end();
        self.drop_table(&mut s);
        for _ in 0..3 {
            let is_right = self.reads_right(&s);
            for at in 0..TWO {
                let window = s.watermarks[self.shard_of(at)] + WINDOW;
                s.counters[at].recounts[0].add(window);
            }
            if !(is_right && self.finish(&mut s, last)) {
                return COUNTS;
            }
        }
        None
    }

    /// Everything stops; then a worker with a right clock finishes. None: it never does.
    fn quiet(&self, s: &State, last: bool) -> Option<State> {
        let mut s = s.clone();
        s.requests = [Step::Over; state::REQUESTS];
        s.workers = [Worker::Idle; state::WORKERS];
        s.reader = Reader::New;
        s.asker = Asker::Over;
        s.marks_sent = Default::default();
        s.now = self.scenario.horizon + self.scenario.skew + 2;
        // The second pass is for the recounts that the first one leaves.
        (self.finish(&mut s, last) && self.finish(&mut s, last)).then_some(s)
    }

    /// Whether no mark of an atomic add is left after three passes. The mark of an undecided one leads to
    /// a second one, this one to one that names the decision, and this one to none.
    fn marks_end(&self, quiet: &State, last: bool) -> bool {
        let none = [Marks::default(); TWO];
        let mut s = quiet.clone();
        if s.atomic_marks == none {
            return true;
        }
        self.finish(&mut s, last) && s.atomic_marks == none
    }

    /// A pass of a worker, after all windows with marks are closed. Returns whether it ends.
    fn finish(&self, s: &mut State, last: bool) -> bool {
        s.now += WINDOW + self.lag();
        (0..self.scenario.shards).all(|shard| self.finish_shard(s, shard, last))
    }

    fn finish_shard(&self, s: &mut State, shard: usize, last: bool) -> bool {
        // A worker gives up if slices vanish again and again.
        for _ in 0..STEPS_OF_A_PASS_MAX {
            let mut next = self.roll(s, s.workers[0], shard);
            if next.is_empty() {
                return true;
            }
            // Writing a counter has variants: the first is that it wins against an equal one.
            let at = if next.len() > 3 && last { 3 } else { 0 };
            let (_, state, worker) = next.swap_remove(at);
            *s = state;
            s.workers[0] = worker;
            self.land_marks(s);
            if worker == Worker::Idle {
                return true;
            }
        }
        false
    }
}

impl Model for Log {
    type State = State;

    fn initial(&self) -> State {
        let is_sent = self.scenario.given_up || self.scenario.acknowledged;
        let store = Store {
            sent: [is_sent, is_sent && self.scenario.atomic],
            landed: [self.scenario.acknowledged, false],
            hidden: [false; TWO],
            decided: [None; TWO],
            watermarks: [0; TWO],
            counters: Default::default(),
            atomic_marks: Default::default(),
            marks_sent: Default::default(),
            settled: Default::default(),
            retired: None,
            dropped_before: 0,
            table_gone: false,
            acknowledged: [self.scenario.acknowledged, false],
            refused: [false; TWO],
            cancelled: [None; TWO],
            misread: false,
            contradicted: false,
        };
        let mut store = store;
        if is_sent {
            self.mark(&mut store, 0);
        }
        let requests = [Step::New; state::REQUESTS];
        let workers = [Worker::Idle; state::WORKERS];
        let asker = if self.scenario.recount { Asker::New } else { Asker::Over };
        let mut state =
            State { now: self.scenario.begins, requests, workers, reader: Reader::New, asker, store };
        for step in self.scenario.led.concat() {
            let mut next = Vec::new();
            self.steps(&state, &mut next);
            let taken = next.into_iter().find(|((who, what), _)| format!("{who} {what}") == step);
            state = taken.unwrap_or_else(|| panic!("{step:?} is not possible: {state:?}")).1;
        }
        state
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < self.scenario.horizon {
            let mut later = s.clone();
            later.now += 1;
            out.push((("time", "passes"), later));
        }
        for at in 0..self.scenario.requests.len() + self.scenario.cancels {
            self.request_steps(s, at, out);
        }
        for at in 0..self.scenario.workers {
            self.worker_steps(s, at, out);
        }
        self.reader_steps(s, out);
        self.asker_steps(s, out);
        self.store_steps(s, out);
        self.maintenance_steps(s, out);
        for (_, state) in out {
            self.canonical(state);
        }
    }

    fn violation(&self, before: &State, s: &State) -> Option<&'static str> {
        if s.store == before.store {
            return None; // It holds, because it held before.
        }
        if (0..TWO).any(|token| s.acknowledged[token] && s.refused[token]) {
            return Some("a definite answer about a token never changes");
        }
        if s.contradicted {
            return Some(
                "a token that was cancelled stays so: it never counts, and was_counted never changes",
            );
        }
        if (0..TWO).any(|token| !self.was_counted_right(before, s, token)) {
            return Some("was_counted is true if the add was acknowledged, and only if it was in a count");
        }
        if s.misread {
            return Some("a read has what was acknowledged before it, and nothing that was refused");
        }
        if !self.reads_right(s) {
            return Some("an acknowledged add counts once, any other at most once, a refused one never");
        }
        self.broken_at_end(s, false).or_else(|| self.broken_at_end(s, true))
    }

    const SITUATIONS: &'static [Situation<Log>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Log>] = &[
    ("an add is acknowledged", |_, s| s.acknowledged != [false; TWO]),
    ("a token is refused", |_, s| s.refused != [false; TWO]),
    ("void is decided while a write of the event is in flight", |_, s| {
        s.sent[0] && s.decided[0] == Some(Outcome::Void)
    }),
    ("an event has landed in a window that the watermark has passed", |m, s| {
        s.landed[0]
            && !s.acknowledged[0]
            && s.watermarks[0] >= m.scenario.tokens[0]
            && s.counters[0].head.checkpoint.1 == Default::default()
    }),
    ("an event has landed, and void is decided", |_, s| s.landed[0] && s.decided[0] == Some(Outcome::Void)),
    ("a resolver goes by a decision that is not its own", |_, s| {
        s.decided[0] == Some(Outcome::Void) && s.requests.contains(&Step::Proposing(Outcome::Applied))
    }),
    ("recounts of one window are pending twice", |_, s| s.counters[0].head.pending[0].all().count() > 1),
    ("a pending recount is done and removed", |_, s| {
        (s.acknowledged[0] || s.refused[0])
            && s.decided[0].is_some()
            && !s.counters[0].head.pending[0].has_any()
    }),
    ("a recount is left in a window that the watermark has passed", |_, s| {
        s.requests.iter().any(|step| matches!(step, Step::Left(_, window) if *window <= s.watermarks[0]))
    }),
    ("a checkpoint is there, and its row is not", |m, s| {
        s.counters[0].head.checkpoint.0 >= m.scenario.tokens[0] && s.counters[0].rows[0].is_none()
    }),
    ("two workers have the same batch in hand", |_, s| match s.workers {
        [Worker::Summed(a, x), Worker::Summed(b, y)] => a.reaches == b.reaches && x != y,
        _ => false,
    }),
    ("a worker has a batch in hand that is older than what is stored", |_, s| {
        let stamp = s.counters[0].checkpoint_stamp;
        s.workers
            .iter()
            .any(|each| matches!(each, Worker::Summed(batch, [Some(_), _]) if batch.reaches < stamp))
    }),
    ("half of an atomic add has landed, and its window is passed", |m, s| {
        m.scenario.atomic && s.landed[0] != s.landed[1] && s.watermarks[0] >= m.scenario.tokens[0]
    }),
    ("the mark of a resolver is passed before its decision", |_, s| {
        s.requests.iter().any(|step| matches!(step, Step::Marking(_, window) if *window <= s.watermarks[0]))
    }),
    ("a slice is dropped before a recount of it that was asked for is done", |m, s| {
        m.scenario.recount && s.table_gone && s.counters[0].recounts[0].has_any()
    }),
    ("one shard has passed an atomic add of which the other one has half", |m, s| {
        m.scenario.shards > 1
            && s.landed[0] != s.landed[1]
            && (s.watermarks[0] >= m.scenario.tokens[0]) != (s.watermarks[1] >= m.scenario.tokens[0])
    }),
    ("a worker is about to void an atomic add that another one has found whole and passed", |m, s| {
        let is_voiding = |worker: &Worker| {
            matches!(worker, Worker::Settling(_, Settling { step: Some(Step::Proposing(Outcome::Void)), .. }))
        };
        m.scenario.shards == 1
            && s.watermarks[0] >= m.scenario.tokens[0]
            && s.workers.iter().any(is_voiding)
            && s.counters[0].head.checkpoint.1 .0[0] == 1
    }),
    ("an add is acknowledged, and erased by a clear", |m, s| {
        m.scenario.clear.map_or(false, |clear| s.acknowledged[1 - clear] && m.read(s, 0).0 == [0; TWO])
    }),
    ("a clear is refused after it was counted", |m, s| {
        m.scenario.clear.map_or(false, |clear| {
            s.decided[clear] == Some(Outcome::Void)
                && s.landed[clear]
                && s.watermarks[0] >= m.scenario.tokens[clear]
        })
    }),
    ("an acknowledged add is cancelled", |_, s| {
        s.acknowledged[0] && s.decided[0] == Some(Outcome::Cancelled(true))
    }),
    ("a refused add is cancelled", |_, s| s.refused[0] && s.decided[0] == Some(Outcome::Cancelled(false))),
    ("an event has landed after its token was cancelled as one that was not counted", |_, s| {
        s.landed[0] && s.decided[0] == Some(Outcome::Cancelled(false))
    }),
    ("an add is cancelled after it was rolled up", |_, s| {
        s.decided[0] == Some(Outcome::Cancelled(true)) && s.counters[0].head.checkpoint.1 .0[0] == 1
    }),
    ("a resolver is about to write again what a cancel has hidden", |_, s| {
        s.hidden[0] && s.requests.contains(&Step::Decided(Outcome::Applied))
    }),
    ("a worker completes a cancel, of which one item is hidden", |_, s| {
        let is_completing = |worker: &Worker| {
            matches!(
                worker,
                Worker::Settling(_, Settling { step: Some(Step::Decided(Outcome::Cancelled(_))), .. })
            )
        };
        s.hidden[0] && s.landed[1] && s.workers.iter().any(is_completing)
    }),
    ("a worker adopts the decision that a mark names", |_, s| {
        let adopts =
            |each: &Worker| matches!(each, Worker::Settling(_, Settling { by: By::WorkerThatAdopts(_), .. }));
        s.workers.iter().any(adopts)
    }),
    ("an atomic add is cancelled after a mark has named its decision", |_, s| {
        s.decided[0].map_or(false, Outcome::is_cancelled) && s.atomic_marks[0].of(Sight::Decision).has_any()
    }),
    ("the mark of a worker is in flight, and another one has passed its window", |_, s| {
        let marks = |each: &Worker| match each {
            Worker::Settling(_, Settling { step: Some(Step::Marking(_, window)), .. }) => Some(*window),
            _ => None,
        };
        s.workers.iter().filter_map(marks).any(|window| window <= s.watermarks[0])
    }),
    ("a slice is dropped before the token is resolved", |_, s| s.table_gone && s.requests[0] != Step::Over),
];
