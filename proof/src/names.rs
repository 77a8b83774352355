//! Deletes of a counter, and the list of names: `CounterService._delete` (counter/core/service.py),
//! `_undone` (rollup/batches.py), and the names in counter/storage/cassandra/rollups.py.
//!
//! A counter is listed, and is deleted at `DELETE`. Of an add that is earlier only this is left: a
//! process that does not know the name may list it, as late as it likes. An add that is later may
//! be in the window of the delete, or in the one after it. Other scenarios show that counts are
//! right, and that a window is closed when no add in it can be acknowledged any more.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;
use crate::times::{Time, Times};

const WINDOW: Time = 2;
const EARLIER: Time = 1;
const DELETE: Time = 2;
const WRITE_TIMEOUT: Time = 1;
const HORIZON: Time = 9;
const DELETES: usize = 2;

pub struct Scenario {
    pub name: &'static str,
    /// The time of the add that is later than the delete.
    pub later: Time,
}

pub const SCENARIOS: &[Scenario] =
    &[Scenario { name: "names", later: 3 }, Scenario { name: "names, next window", later: 4 }];

/// How far the add is that is later than the delete.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Add {
    New,
    Marked,
    Sent(Time),
    Over,
}

/// How far a request for the delete is. It may stop anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Delete {
    New,
    /// Its clear is written, and it has looked for a later event: whether it found one, how many
    /// of its acts are done, and the window that it has asked for a recount in.
    Searched(bool, usize, Time),
    Over,
}

/// What a delete does after its search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Note,
    /// `Resolver.request_recounts`: ask, and ask again if a worker may have passed the window.
    Ask,
    Check,
    Unlist,
}

/// A worker: what it read decides what it writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Worker {
    Idle,
    /// It found the counter in the marks of windows up to this instant.
    Marked(Time),
    /// Whether it has read the note.
    Headed(Time, bool),
    /// It has found an event that is later than the note.
    Undone(Time),
    /// It has done the first of two writes.
    Half(Time),
    Advancing(Time),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    add: Add,
    deletes: [Delete; DELETES],
    worker: Worker,
    /// The write timestamps of the name and of its deletion: the later one wins, of equal ones the
    /// deletion.
    listed: Time,
    unlisted: Time,
    /// The note of the delete, and whether it was removed: then the same one cannot be left again.
    note: bool,
    note_removed: bool,
    event: bool,
    mark: bool,
    recounts: Times,
    watermark: Time,
    acknowledged: bool,
    deleted: bool,
    /// A retry that began after the later event goes on as if it were not there; it has hidden the
    /// name.
    ignores_later: bool,
    hid_later: bool,
}

pub struct Names {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

fn window_of(time: Time) -> Time {
    time - time % WINDOW
}

impl State {
    fn is_listed(&self) -> bool {
        self.listed > self.unlisted
    }
}

impl Names {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    /// The write timestamp of a name that an add at *time* lists.
    fn stamp(&self, s: &State, time: Time) -> Time {
        if self.breaks(Rule::ListedAtWindow) {
            s.now
        } else {
            window_of(time)
        }
    }

    /// A process that does not know the name lists it, for the retry of an earlier add.
    fn earlier_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        next.listed = next.listed.max(self.stamp(s, EARLIER));
        out.push((("retry of an earlier add", "lists the name"), next));
    }

    /// `EventWriter.write_admitted`. The process may remember that the name is listed.
    fn add_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let time = self.scenario.later;
        let mut push = |what: &'static str, add: Add, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.add = add;
            change(&mut next);
            out.push((("add", what), next));
        };
        match s.add {
            Add::New => {
                let mark = |next: &mut State| next.mark |= window_of(time) > s.watermark;
                push("leaves its mark, and knows the name", Add::Marked, &mark);
                push("leaves its mark, and lists the name", Add::Marked, &|next| {
                    mark(next);
                    next.listed = next.listed.max(self.stamp(s, time));
                });
            }
            Add::Marked if s.now <= time => push("sends its event", Add::Sent(s.now), &|_| {}),
            Add::Sent(began) => {
                push("its event lands", Add::Over, &|next| {
                    next.event = true;
                    next.acknowledged = s.now - began <= WRITE_TIMEOUT;
                });
            }
            _ => {}
        }
    }

    /// `CounterService._delete`: what follows the search.
    fn acts(&self, finds: bool) -> &'static [Act] {
        match self.broken {
            _ if finds => &[Act::Ask, Act::Check],
            Some(Rule::NoteFirst) => &[Act::Unlist, Act::Note, Act::Ask, Act::Check],
            Some(Rule::UnlistedLast) => &[Act::Note, Act::Unlist, Act::Ask, Act::Check],
            Some(Rule::DeleteRecounts) => &[Act::Note, Act::Unlist],
            Some(Rule::RecountAfterNote) => &[Act::Ask, Act::Check, Act::Note, Act::Unlist],
            _ => &[Act::Note, Act::Ask, Act::Check, Act::Unlist],
        }
    }

    /// `CounterService._delete`: clear, search, note, recount, list.
    fn delete_steps(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let (what, step) = match s.deletes[at] {
            Delete::Over => return,
            Delete::New => {
                let finds = s.event && !self.breaks(Rule::DeleteSearches);
                next.ignores_later |= s.event && !finds;
                ("is cleared, and looks for a later event", Delete::Searched(finds, 0, 0))
            }
            Delete::Searched(finds, done, window) => {
                let then = Delete::Searched(finds, done + 1, window);
                match self.acts(finds).get(done) {
                    None => {
                        next.deleted = true;
                        ("is acknowledged", Delete::Over)
                    }
                    Some(Act::Note) => {
                        next.note = !s.note_removed && !self.breaks(Rule::DeleteNoted);
                        ("leaves its note", then)
                    }
                    Some(Act::Ask) => {
                        let window = window_of(s.now);
                        if window > s.watermark {
                            next.recounts.add(window);
                        }
                        ("asks for a recount", Delete::Searched(finds, done + 1, window))
                    }
                    Some(Act::Check) if s.now <= window + WINDOW => ("has asked in time", then),
                    Some(Act::Check) => ("took too long to ask", Delete::Searched(finds, done - 1, 0)),
                    Some(Act::Unlist) => {
                        let stamp = if self.breaks(Rule::UnlistedAtDelete) { s.now } else { DELETE };
                        next.unlisted = s.unlisted.max(stamp);
                        next.hid_later |= s.ignores_later && s.is_listed() && !next.is_listed();
                        ("takes the name off the list", then)
                    }
                }
            }
        };
        next.deletes[at] = match step {
            // The window does not matter any more.
            Delete::Searched(finds, done, _) if self.acts(finds).get(done) != Some(&Act::Check) => {
                Delete::Searched(finds, done, 0)
            }
            step => step,
        };
        next.deletes.sort_unstable();
        out.push((("delete", what), next));
    }

    /// The last instant of the last window that is closed.
    fn closed_through(&self, now: Time) -> Time {
        window_of(now - WRITE_TIMEOUT) - 1
    }

    /// `BatchRoller._roll_once`, `_undone`, and `CassandraRollups.apply`.
    fn roll(&self, s: &State) -> Option<(&'static str, State)> {
        let mut next = s.clone();
        let list_again = |next: &mut State| {
            let after = if self.breaks(Rule::ListedAfterDelete) { 0 } else { 1 };
            next.listed = next.listed.max(DELETE + after);
        };
        let remove_note = |next: &mut State| {
            next.note = false;
            next.note_removed = true;
        };
        let (what, worker) = match s.worker {
            Worker::Idle => {
                let through = self.closed_through(s.now);
                if through <= s.watermark {
                    return None;
                }
                let is_marked = s.mark && window_of(self.scenario.later) <= through;
                let is_asked = s.recounts.between(s.watermark, through).has_any();
                let has_marks = is_marked || is_asked;
                ("reads marks", if has_marks { Worker::Marked(through) } else { Worker::Advancing(through) })
            }
            Worker::Marked(through) => ("reads the head", Worker::Headed(through, s.note)),
            Worker::Headed(through, has_note) => {
                let is_undone = has_note && (s.event || self.breaks(Rule::UndoneWhenLater));
                let then = if is_undone { Worker::Undone(through) } else { Worker::Advancing(through) };
                ("looks for a later event", then)
            }
            Worker::Undone(through) if self.breaks(Rule::ListedBeforeRemoved) => {
                remove_note(&mut next);
                ("removes the note", Worker::Half(through))
            }
            Worker::Undone(through) => {
                list_again(&mut next);
                ("lists the name again", Worker::Half(through))
            }
            Worker::Half(through) if self.breaks(Rule::ListedBeforeRemoved) => {
                list_again(&mut next);
                ("lists the name again", Worker::Advancing(through))
            }
            Worker::Half(through) => {
                remove_note(&mut next);
                ("removes the note", Worker::Advancing(through))
            }
            Worker::Advancing(through) => {
                next.watermark = next.watermark.max(through);
                next.mark &= window_of(self.scenario.later) > next.watermark;
                next.recounts = next.recounts.between(next.watermark, 31);
                ("moves the watermark", Worker::Idle)
            }
        };
        next.worker = worker;
        Some((what, next))
    }

    /// Everything stops; then a worker finishes.
    fn quiet(&self, s: &State) -> State {
        let mut quiet = State { now: HORIZON + 2 * WINDOW, worker: Worker::Idle, ..s.clone() };
        while let Some((_, next)) = self.roll(&quiet) {
            quiet = next;
        }
        quiet
    }
}

impl Model for Names {
    type State = State;

    fn initial(&self) -> State {
        State {
            now: DELETE,
            add: Add::New,
            deletes: [Delete::New; DELETES],
            worker: Worker::Idle,
            listed: window_of(EARLIER),
            unlisted: -1,
            note: false,
            note_removed: false,
            event: false,
            mark: false,
            recounts: Times::default(),
            watermark: window_of(DELETE) - 1,
            acknowledged: false,
            deleted: false,
            ignores_later: false,
            hid_later: false,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            out.push((("time", "passes"), State { now: s.now + 1, ..s.clone() }));
        }
        self.earlier_steps(s, out);
        self.add_steps(s, out);
        for at in 0..DELETES {
            self.delete_steps(s, at, out);
        }
        out.extend(self.roll(s).map(|(what, next)| (("worker", what), next)));
        if s.worker != Worker::Idle {
            out.push((("worker", "stops"), State { worker: Worker::Idle, ..s.clone() }));
        }
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.hid_later {
            return Some("a retry of a delete does not hide what came after it");
        }
        let end = self.quiet(s);
        if end.acknowledged && !end.is_listed() {
            return Some("a counter with an acknowledged add that is later than its delete is listed");
        }
        if end.deleted && s.add == Add::New && end.is_listed() {
            return Some("a deleted counter is not listed until it has a later add");
        }
        None
    }

    const SITUATIONS: &'static [Situation<Names>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Names>] = &[
    ("a delete is acknowledged, and nothing followed", |_, s| {
        s.deleted && !s.is_listed() && s.add == Add::New
    }),
    ("an add is counted between the search of a delete and its note", |m, s| {
        s.deletes.contains(&Delete::Searched(false, 0, 0))
            && s.event
            && s.watermark >= m.scenario.later
            && !s.note
    }),
    ("a name is missing although a later add is acknowledged", |_, s| s.acknowledged && !s.is_listed()),
    ("a name is listed again by a worker", |_, s| s.note_removed && s.is_listed()),
    ("a late write takes a name off the list that a worker has listed again", |_, s| {
        s.note_removed && s.unlisted < DELETE && s.deletes.contains(&Delete::Searched(false, 3, 0))
    }),
    ("a retry finds a later event", |_, s| {
        s.deletes.iter().any(|each| matches!(each, Delete::Searched(true, ..)))
    }),
];
