//! A slice that is made late, while others add, read, roll up and drop: `Maintenance.make_slices`,
//! `_drop_slices` (rollup/maintenance.py), `CassandraSlices` (counter/storage/cassandra/slices.py),
//! `EventFolds.tails` (event_reads.py).
//!
//! Two slices of one window each; one token in the first one. A process may have any list of slices
//! that there was, and reads the list again if it misses a slice in it. The list and the tables
//! change apart. A namespace may come into being at any time before the token.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;

type Time = i8;

/// The slices are `[2, 3)` and `[3, 4)`; the token's window is the first one.
const STARTS: [Time; 2] = [2, 3];
const TOKEN: Time = 2;
const SIZE: Time = 1;
const ACCEPT_LIMIT: Time = 1;
const WRITE_TIMEOUT: Time = 1;
const CLOSES: Time = TOKEN + SIZE + ACCEPT_LIMIT + WRITE_TIMEOUT;
const RETENTION: Time = 4;
/// How long after it read the slices a process makes one: `_MAKING_US`.
const MAKING: Time = 1;
const HORIZON: Time = 9;
const PAIR: usize = 2;

/// The lists of slices that a process may have: of each slice, whether it is there.
type List = [bool; 2];

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Maker {
    New,
    /// What it is to make, in order, and when it read the slices.
    Making([Option<usize>; 2], Time),
    /// It has the first one's table.
    HasTable([Option<usize>; 2], Time),
    /// The slice was dropped meanwhile: its table is to go.
    Undoing(usize),
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Add {
    New,
    Marked,
    Sent(Time),
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Worker {
    Idle,
    Marked,
    Summed(bool),
}

/// `CountReader.read`: the watermark and the checkpoint, then the tail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reader {
    New,
    /// Whether an add was acknowledged before, whether the watermark covers it, and the count.
    Stored(bool, bool, bool),
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dropper {
    Idle,
    /// It has read its clock.
    Due,
    /// It has read the namespaces: whether ours is among them.
    Knows(bool),
    /// The table of the slice is to go, and then its row.
    Moved(usize),
    Dropped(usize),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    named: bool,
    makers: [Maker; PAIR],
    add: Add,
    workers: [Worker; PAIR],
    reader: Reader,
    dropper: Dropper,
    rows: List,
    tables: List,
    /// A bit for each list of slices that there was.
    lists: u8,
    /// So many slices are before `dropped_before`.
    dropped: usize,
    mark: bool,
    event: bool,
    /// What the row of the window says, if it is written.
    row: Option<bool>,
    passed: bool,
    acknowledged: bool,
    misread: bool,
}

pub struct Slices {
    pub broken: Option<Rule>,
}

impl State {
    /// `DatasetState`: the slices that `dropped_before` has not passed.
    fn list(&self) -> List {
        [self.rows[0] && self.dropped < 1, self.rows[1] && self.dropped < 2]
    }

    fn note_list(&mut self) {
        let list = self.list();
        self.lists |= 1 << (usize::from(list[0]) + 2 * usize::from(list[1]));
    }

    fn has_had(&self, list: List) -> bool {
        self.lists >> (usize::from(list[0]) + 2 * usize::from(list[1])) & 1 == 1
    }

    /// Whether a process may take the first slice for one that exists.
    fn may_know(&self) -> bool {
        self.has_had([true, false]) || self.has_had([true, true])
    }
}

impl Slices {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    /// `Maintenance.make_slices`: what is missing, in the order of making.
    fn missing(&self, s: &State) -> [Option<usize>; 2] {
        let list = s.list();
        let is_missing = |at: usize| {
            !list[at]
                && s.dropped <= at
                && STARTS[at] <= s.now + SIZE
                && STARTS[at] + SIZE > s.now - RETENTION
        };
        let lag = if self.breaks(Rule::OpenSlicesFirst) { 0 } else { SIZE + WRITE_TIMEOUT };
        let is_past = |at: usize| STARTS[at] + SIZE <= s.now - lag;
        let of = |at: usize| Some(at).filter(|at| is_missing(*at));
        let order = if is_past(0) && !is_past(1) { [of(1), of(0)] } else { [of(0), of(1)] };
        if order[0].is_none() {
            [order[1], None]
        } else {
            order
        }
    }

    fn make(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let mut step = Maker::Over;
        let what = match s.makers[at] {
            Maker::New => {
                let missing = self.missing(s);
                if missing[0].is_none() {
                    return;
                }
                step = Maker::Making(missing, s.now);
                "reads the slices"
            }
            Maker::Making(_, read) if s.now - read > MAKING && !self.breaks(Rule::MadeInTime) => "gives up",
            Maker::Making(slices, read) => {
                next.tables[slices[0].unwrap()] = true;
                step = Maker::HasTable(slices, read);
                "makes a table"
            }
            Maker::HasTable(slices, read) => {
                let slice = slices[0].unwrap();
                if s.rows[slice] {
                    step = Maker::Making([slices[1], None], read);
                } else if s.dropped > slice && !self.breaks(Rule::NotMadeAgain) {
                    step = Maker::Undoing(slice);
                } else {
                    next.rows[slice] = true;
                    if self.breaks(Rule::NotMadeAgain) {
                        next.dropped = next.dropped.min(slice);
                    }
                    next.note_list();
                    step = Maker::Making([slices[1], None], read);
                }
                if matches!(step, Maker::Making([None, _], _)) {
                    step = Maker::Over;
                }
                "writes its row"
            }
            Maker::Undoing(slice) => {
                next.tables[slice] = false;
                next.event &= slice != 0;
                "drops the table again"
            }
            Maker::Over => return,
        };
        next.makers[at] = step;
        next.makers.sort_unstable();
        out.push((("maker", what), next));
    }

    /// `EventWriter.write_admitted`.
    fn add(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Add, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.add = step;
            change(&mut next);
            out.push((("add", what), next));
        };
        match s.add {
            Add::New if s.named && (s.may_know() || self.breaks(Rule::MarkNeedsSlice)) => {
                push("leaves its mark", Add::Marked, &|next| next.mark |= !s.passed)
            }
            Add::Marked if s.now <= TOKEN + ACCEPT_LIMIT => {
                push("sends its event", Add::Sent(s.now), &|_| {})
            }
            Add::Sent(began) if s.tables[0] && s.may_know() => {
                push("has its event landed", Add::Over, &|next| {
                    next.event = true;
                    next.acknowledged = s.now - began <= WRITE_TIMEOUT;
                })
            }
            _ => {}
        }
    }

    /// `RollupWorker.roll_shard`. Of two workers that write the row of one batch, either may win.
    fn roll(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Worker, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.workers[at] = step;
            change(&mut next);
            next.workers.sort_unstable();
            out.push((("worker", what), next));
        };
        match s.workers[at] {
            Worker::Idle if s.now >= CLOSES && s.named && !s.passed => {
                if s.mark {
                    push("reads marks", Worker::Marked, &|_| {});
                } else {
                    push("passes the window", Worker::Idle, &|next| next.passed = true);
                }
            }
            Worker::Marked if s.may_know() && s.tables[0] => {
                push("sums the window", Worker::Summed(s.event), &|_| {})
            }
            // Its window is in no slice, or the slice is dropped: it begins again.
            Worker::Marked => push("misses the slice", Worker::Idle, &|_| {}),
            Worker::Summed(sum) => {
                push("writes its row", Worker::Idle, &|next| {
                    next.row = Some(sum);
                    next.passed = true;
                });
                if s.row.is_some() {
                    push("writes its row, which stays hidden", Worker::Idle, &|next| next.passed = true);
                }
            }
            _ => {}
        }
    }

    fn read(&self, s: &State, out: &mut Vec<(Label, State)>) {
        match s.reader {
            Reader::New if s.named => {
                let mut next = s.clone();
                next.reader = Reader::Stored(s.acknowledged, s.passed, s.row == Some(true));
                out.push((("reader", "reads the watermark and the checkpoint"), next));
            }
            Reader::Stored(owed, covered, count) => {
                for list in [[false, true], [true, true], s.list()] {
                    // A list that ends too early is read again.
                    let is_known = s.has_had(list) && list[1] || list == s.list();
                    let is_missing = list[0] && !s.tables[0] || s.dropped > 0;
                    if !is_known || is_missing && !covered {
                        continue;
                    }
                    let mut next = s.clone();
                    let has_it = if covered { count } else { list[0] && s.event };
                    next.reader = Reader::Over;
                    next.misread = owed && !has_it;
                    out.push((("reader", "reads the tail"), next));
                }
            }
            _ => {}
        }
    }

    /// `Maintenance._drop_slices`, `CassandraSlices.drop_slice`.
    fn drop(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let first = if s.list()[0] { 0 } else { 1 };
        let is_due = s.list()[first] && s.now >= STARTS[first] + SIZE + RETENTION;
        let (what, step) = match s.dropper {
            Dropper::Idle if self.breaks(Rule::NamespacesAfterClock) => {
                ("has a copy of the directory", Dropper::Knows(s.named))
            }
            Dropper::Idle if is_due => ("reads its clock", Dropper::Due),
            Dropper::Due => ("reads the namespaces", Dropper::Knows(s.named)),
            Dropper::Knows(named) if is_due && (!named || s.passed) => {
                next.dropped = first + 1;
                next.note_list();
                ("moves dropped_before", Dropper::Moved(first))
            }
            Dropper::Knows(_) if !is_due => return,
            Dropper::Knows(_) => ("finds a watermark that is behind", Dropper::Idle),
            Dropper::Moved(slice) => {
                // The sweep: of every slice that dropped_before has passed.
                next.tables[..=slice].fill(false);
                next.event = false;
                ("drops the table", Dropper::Dropped(slice))
            }
            Dropper::Dropped(slice) => {
                next.rows[..=slice].fill(false);
                ("removes the row", Dropper::Idle)
            }
            _ => return,
        };
        next.dropper = step;
        out.push((("dropper", what), next));
    }
}

impl Model for Slices {
    type State = State;

    fn initial(&self) -> State {
        State {
            now: 1,
            named: false,
            makers: [Maker::New; PAIR],
            add: Add::New,
            workers: [Worker::Idle; PAIR],
            reader: Reader::New,
            dropper: Dropper::Idle,
            rows: [false; 2],
            tables: [false; 2],
            lists: 1,
            dropped: 0,
            mark: false,
            event: false,
            row: None,
            passed: false,
            acknowledged: false,
            misread: false,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            out.push((("time", "passes"), State { now: s.now + 1, ..s.clone() }));
        }
        if !s.named && s.now <= TOKEN + ACCEPT_LIMIT {
            out.push((("namespace", "is created"), State { named: true, ..s.clone() }));
        }
        for at in 0..PAIR {
            self.make(s, at, out);
            self.roll(s, at, out);
        }
        self.add(s, out);
        self.read(s, out);
        self.drop(s, out);
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.misread {
            return Some("an accurate read has every add that was acknowledged before");
        }
        if s.acknowledged && s.passed && s.row != Some(true) {
            return Some("an acknowledged add counts once its window is rolled up");
        }
        let is_over = s.now >= TOKEN + SIZE + RETENTION && s.makers.iter().all(|each| *each == Maker::New);
        if is_over && s.mark && !s.passed && !s.may_know() {
            return Some("a window with a mark can be summed");
        }
        if s.acknowledged && s.dropped > 0 && !s.passed {
            return Some("no event is dropped before it is counted");
        }
        None
    }

    const SITUATIONS: &'static [Situation<Slices>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Slices>] = &[
    ("a slice is made when its window is closed", |_, s| {
        s.rows[0]
            && s.now >= CLOSES
            && s.makers.iter().any(|each| matches!(each, Maker::HasTable(_, read) if *read >= CLOSES))
    }),
    ("a later slice is made, and an earlier one is missing", |_, s| {
        s.list() == [false, true] && s.dropped == 0
    }),
    ("a table is made of a slice that was dropped meanwhile", |_, s| {
        s.makers.iter().any(|each| matches!(each, Maker::Undoing(_)))
    }),
    ("an add is acknowledged in a slice that was made when its time had come", |_, s| {
        s.acknowledged
            && s.makers.iter().any(|each| matches!(each, Maker::Making([Some(1), _], read) if *read >= TOKEN))
    }),
    ("a worker sums a window of a slice that was dropped", |_, s| {
        s.dropped > 0 && s.workers.contains(&Worker::Marked)
    }),
    ("a count outlives the slice of its event", |_, s| s.row == Some(true) && !s.tables[0]),
    ("a reader finds its slice dropped after its watermark", |_, s| {
        s.dropped > 0 && matches!(s.reader, Reader::Stored(_, false, _))
    }),
];
