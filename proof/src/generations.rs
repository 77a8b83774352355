//! A namespace that is deleted and created again under its name over Cassandra: `CassandraControl`
//! (counter/storage/cassandra/control.py), `CassandraPurge.purge` (slices.py), `Namespaces.current`
//! (counter/core/namespaces.py).
//!
//! One name, whose row a compare-and-set changes; it lands at any time within `LATE`, or never. The
//! directory is the versions of the row: an add goes by one that was the latest within `AGE`, a read
//! by any. One add, so that what is acknowledged is one generation's.

use crate::checker::{Label, Model, Situation};
use crate::rules::Rule;

type Time = i8;
/// The number of a namespace, from 1.
type Number = usize;

/// How old a copy of the directory is at most when an event is written.
const AGE: Time = 0;
const WRITE_TIMEOUT: Time = 1;
/// `settling_time`; the last tick is for clocks that drift apart.
const SETTLING: Time = AGE + WRITE_TIMEOUT + 1;
/// For how long after it was sent a compare-and-set may land.
const LATE: Time = 2;
/// `_ROW_KEPT_US`.
const ROW_KEPT: Time = LATE + 1;
const HORIZON: Time = 7;
const CREATES: usize = 2;
const NUMBERS: usize = CREATES + 2;

pub struct Scenario {
    pub name: &'static str,
    pub quick: bool,
    first: Row,
    creates: usize,
    deletes: usize,
}

pub const SCENARIOS: &[Scenario] = &[
    Scenario { name: "generations", quick: true, first: Row::Live(1), creates: 1, deletes: 1 },
    Scenario { name: "generations, late create", quick: false, first: Row::None, creates: 2, deletes: 1 },
];

/// The row of the name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Row {
    None,
    Live(Number),
    /// With the instant that its deletion was noted at, which only a broken rule reads.
    Deleted(Number, Time),
}

/// A version of the row, and for how long it has not been the latest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Version {
    row: Row,
    age: Time,
}

/// `CassandraControl.create_namespace`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Create {
    New,
    /// It saw a deleted namespace at this instant.
    Waiting(Number, Time),
    /// It may create, where the row is this one.
    Ready(Row),
    /// Its compare-and-set is sent: its number, and the row that it replaces.
    Sent(Number, Row),
    /// Another one had the name at this instant.
    Refused(Number, Time),
    /// Its watermarks are still to be written; only if that order is broken.
    Bare(Number),
    Over,
}

/// A compare-and-set that timed out and was sent again: its number, the row that it replaces (none
/// when it has landed), and when it was sent.
type Flying = Option<(Number, Option<Row>, Time)>;

/// `CassandraControl.delete_namespace`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Delete {
    New,
    Noted(Number, Time),
    Marked(Number),
    Over,
}

/// `CassandraPurge.purge`: the deleted namespace that it saw, and when.
type Purge = Option<(Number, Time)>;

/// `EventWriter.write_admitted`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Add {
    New,
    /// It has looked its namespace up, and leaves its mark.
    Marking(Number),
    /// The last check was at this instant; how many times a namespace had been created by then.
    Sent(Number, Time, usize),
    Over,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    now: Time,
    versions: Vec<Version>,
    /// How many times a namespace of the name has come into being.
    lives: usize,
    latest_number: Number,
    creates: [Create; CREATES],
    flying: [Flying; CREATES],
    deletes: [Delete; CREATES],
    purge: Purge,
    add: Add,
    watermarks: [bool; NUMBERS],
    /// The number that the event is stored under, and the life that it was sent in.
    stored: Option<(Number, usize)>,
    /// The life that the acknowledged add was sent in.
    acknowledged: Option<usize>,
    acknowledged_late: bool,
    misled: bool,
}

pub struct Generations {
    pub scenario: &'static Scenario,
    pub broken: Option<Rule>,
}

impl State {
    fn row(&self) -> Row {
        self.versions[self.versions.len() - 1].row
    }

    /// Forget the versions that nothing can use any more.
    fn forget(&mut self) {
        let latest = self.versions.len() - 1;
        let watermarks = self.watermarks;
        let mut at = 0;
        self.versions.retain(|each| {
            at += 1;
            at > latest || each.age <= AGE || matches!(each.row, Row::Live(of) if watermarks[of])
        });
    }

    /// Creations are interchangeable.
    fn sort(&mut self) {
        let mut both: Vec<_> = self.creates.into_iter().zip(self.flying).collect();
        both.sort_unstable();
        for (at, (create, flying)) in both.into_iter().enumerate() {
            self.creates[at] = create;
            self.flying[at] = flying;
        }
    }

    fn put(&mut self, row: Row) {
        let latest = self.versions.len() - 1;
        // Its age is the time since it was replaced.
        self.versions[latest].age = 0;
        self.lives += usize::from(matches!(row, Row::Live(_)));
        self.versions.push(Version { row, age: 0 });
    }
}

impl Generations {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    /// Whether no add to a deleted namespace can be acknowledged any more, by a process that saw it
    /// at *seen*.
    fn is_settled(&self, s: &State, seen: Time) -> bool {
        let from = match s.row() {
            Row::Deleted(_, noted) if self.breaks(Rule::SettlesFromSight) => noted,
            _ => seen,
        };
        self.breaks(Rule::NameSettles) || s.now - from >= SETTLING
    }

    /// What precedes the end of a deleted namespace's row.
    fn end(&self, s: &mut State, number: Number) {
        s.watermarks[number] &= self.breaks(Rule::WatermarksGone);
    }

    fn create(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Create, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.creates[at] = step;
            change(&mut next);
            next.sort();
            out.push((("create", what), next));
        };
        match s.creates[at] {
            Create::New => match s.row() {
                Row::None => push("finds the name free", Create::Ready(Row::None), &|_| {}),
                Row::Live(_) => {}
                Row::Deleted(number, _) => {
                    push("finds a deleted namespace", Create::Waiting(number, s.now), &|_| {})
                }
            },
            Create::Waiting(number, seen) if self.is_settled(s, seen) => {
                let row = s.row();
                let is_same = matches!(row, Row::Deleted(of, _) if of == number);
                if !is_same {
                    push("finds another row", Create::Over, &|_| {});
                } else if self.breaks(Rule::NameReplaced) {
                    push("removes the deleted row", Create::Ready(Row::None), &|next| {
                        self.end(next, number);
                        next.put(Row::None);
                    });
                } else {
                    push("takes the deleted watermarks away", Create::Ready(row), &|next| {
                        self.end(next, number)
                    });
                }
            }
            Create::Ready(over) => {
                let is_again = self.breaks(Rule::NumbersTaken) && over != Row::None;
                let number = s.latest_number + usize::from(!is_again);
                push("takes a number, and sends its row", Create::Sent(number, over), &|next| {
                    next.latest_number = number;
                    next.watermarks[number] = !self.breaks(Rule::WatermarksFirst);
                });
            }
            Create::Sent(number, over) => {
                let made =
                    if self.breaks(Rule::WatermarksFirst) { Create::Bare(number) } else { Create::Over };
                if s.row() == over {
                    push("creates", made, &|next| next.put(Row::Live(number)));
                } else if s.row() == Row::Live(number) {
                    push("finds that it has created", made, &|_| {});
                } else {
                    push("finds another row", Create::Refused(number, s.now), &|_| {});
                }
                if s.flying[at].is_none() {
                    push("is not answered, and sends its row again", Create::Sent(number, over), &|next| {
                        next.flying[at] = Some((number, Some(over), s.now))
                    });
                }
            }
            Create::Refused(number, _) if s.row() == Row::Live(number) => {
                push("has created after all", Create::Over, &|_| {})
            }
            Create::Refused(number, since) if s.now - since > LATE || self.breaks(Rule::RefusedLater) => {
                push("has its watermarks taken away", Create::Over, &|next| next.watermarks[number] = false)
            }
            Create::Bare(number) => {
                push("writes its watermarks", Create::Over, &|next| next.watermarks[number] = true)
            }
            _ => {}
        }
        if let Some((number, Some(over), sent)) = s.flying[at] {
            if s.row() == over {
                let mut next = s.clone();
                next.flying[at] = Some((number, None, sent));
                next.put(Row::Live(number));
                next.sort();
                out.push((("create", "has its first row landed late"), next));
            }
        }
    }

    fn delete(&self, s: &State, at: usize, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let (what, step) = match (s.deletes[at], s.row()) {
            (Delete::New, Row::Live(number)) => {
                let noted = if self.breaks(Rule::SettlesFromSight) { s.now } else { 0 };
                ("notes the departure", Delete::Noted(number, noted))
            }
            (Delete::Noted(number, noted), Row::Live(of)) if of == number => {
                next.put(Row::Deleted(number, noted));
                ("marks the row", Delete::Marked(number))
            }
            (Delete::Noted(..), _) => ("finds another row", Delete::Over),
            (Delete::Marked(number), _) => {
                next.watermarks[number] = false;
                ("takes the watermarks away", Delete::Over)
            }
            _ => return,
        };
        next.deletes[at] = step;
        next.deletes.sort_unstable();
        out.push((("delete", what), next));
    }

    fn purge(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut next = s.clone();
        let kept = if self.breaks(Rule::NameKept) { SETTLING } else { ROW_KEPT };
        let what = match (s.purge, s.row()) {
            (None, Row::Deleted(number, _)) => {
                next.purge = Some((number, s.now));
                "finds a deleted namespace"
            }
            (Some((number, seen)), Row::Deleted(of, _)) if of == number => {
                if s.now - seen >= kept {
                    self.end(&mut next, number);
                    next.put(Row::None);
                    next.purge = None;
                    "removes the row"
                } else if self.is_settled(s, seen) && s.watermarks[number] {
                    next.watermarks[number] = false;
                    "takes the watermarks away"
                } else {
                    return;
                }
            }
            (Some(_), _) => {
                next.purge = None;
                "finds another row"
            }
            _ => return,
        };
        out.push((("purge", what), next));
    }

    fn add(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let mut push = |what: &'static str, step: Add, change: &dyn Fn(&mut State)| {
            let mut next = s.clone();
            next.add = step;
            change(&mut next);
            out.push((("add", what), next));
        };
        let fresh = s.versions.iter().filter(|each| each.age <= AGE);
        match s.add {
            Add::New => {
                for copy in fresh {
                    if let Row::Live(number) = copy.row {
                        push("leaves its mark", Add::Marking(number), &|_| {});
                    }
                }
            }
            Add::Marking(number) => {
                let is_unchecked = self.breaks(Rule::NamespaceLookedUpAgain);
                if is_unchecked || fresh.into_iter().any(|copy| copy.row == Row::Live(number)) {
                    push("sends its event", Add::Sent(number, s.now, s.lives), &|_| {});
                } else {
                    push("is refused", Add::Over, &|_| {});
                }
            }
            Add::Sent(number, began, life) => push("has its event landed", Add::Over, &|next| {
                next.stored = Some((number, life));
                if s.now - began <= WRITE_TIMEOUT {
                    next.acknowledged = Some(life);
                    next.acknowledged_late = matches!(s.row(), Row::Live(of) if of != number);
                }
            }),
            Add::Over => {}
        }
    }

    /// `CountReader.read`: the watermarks, and what follows. Without them there is no answer.
    fn read(&self, s: &State, out: &mut Vec<(Label, State)>) {
        let (Row::Live(number), Some(life)) = (s.row(), s.acknowledged) else { return };
        let is_owed = s.stored == Some((number, life)) && life == s.lives;
        let misleads = |copy: &Version| matches!(copy.row, Row::Live(of) if of != number && s.watermarks[of]);
        if is_owed && s.versions.iter().any(misleads) {
            let mut next = s.clone();
            next.misled = true;
            out.push((("reader", "has an old copy of the directory, and answers"), next));
        }
    }
}

impl Model for Generations {
    type State = State;

    fn initial(&self) -> State {
        let scenario = self.scenario;
        let mut watermarks = [false; NUMBERS];
        watermarks[1] = scenario.first != Row::None;
        let of = |count: usize, at: usize| at < count;
        State {
            now: 0,
            versions: vec![Version { row: scenario.first, age: 0 }],
            lives: usize::from(scenario.first != Row::None),
            latest_number: usize::from(scenario.first != Row::None),
            creates: std::array::from_fn(
                |at| if of(scenario.creates, at) { Create::New } else { Create::Over },
            ),
            flying: [None; CREATES],
            deletes: std::array::from_fn(
                |at| if of(scenario.deletes, at) { Delete::New } else { Delete::Over },
            ),
            purge: None,
            add: Add::New,
            watermarks,
            stored: None,
            acknowledged: None,
            acknowledged_late: false,
            misled: false,
        }
    }

    fn steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if s.now < HORIZON {
            let mut later = s.clone();
            later.now += 1;
            let latest = later.versions.len() - 1;
            for each in &mut later.versions[..latest] {
                each.age = (each.age + 1).min(AGE + 1);
            }
            for at in 0..CREATES {
                if s.flying[at].is_some_and(|(_, _, sent)| later.now - sent > LATE) {
                    later.flying[at] = None;
                    later.creates[at] = match s.creates[at] {
                        Create::Sent(..) => Create::Over,
                        other => other,
                    };
                }
            }
            later.forget();
            later.sort();
            out.push((("time", "passes"), later));
        }
        for at in 0..CREATES {
            self.create(s, at, out);
            self.delete(s, at, out);
        }
        self.purge(s, out);
        self.add(s, out);
        self.read(s, out);
    }

    fn violation(&self, _: &State, s: &State) -> Option<&'static str> {
        if s.acknowledged_late {
            return Some("no add to a deleted namespace is acknowledged when its name is in use again");
        }
        if s.misled {
            return Some("a read has every add that was acknowledged before, whatever copy it goes by");
        }
        let Row::Live(number) = s.row() else { return None };
        if s.acknowledged == Some(s.lives) && !s.watermarks[number] {
            return Some("an acknowledged add counts while its namespace exists");
        }
        match s.stored {
            Some((of, life)) if of == number && life != s.lives && s.watermarks[number] => {
                Some("no add to a deleted namespace counts in one that is created later")
            }
            _ => None,
        }
    }

    const SITUATIONS: &'static [Situation<Generations>] = SITUATIONS;
}

const SITUATIONS: &[Situation<Generations>] = &[
    ("an add to the second namespace of a name is acknowledged", |_, s| {
        s.acknowledged == Some(s.lives) && s.lives == 2 && matches!(s.row(), Row::Live(_))
    }),
    ("an add to a deleted namespace is acknowledged", |_, s| {
        s.acknowledged.is_some() && s.stored.is_some() && matches!(s.row(), Row::Deleted(..))
    }),
    ("an event lands when its namespace has another one's name", |_, s| match (s.row(), s.stored) {
        (Row::Live(number), Some((of, _))) => of != number && s.acknowledged.is_none(),
        _ => false,
    }),
    ("a name is free again, and a creation from before may still land", |_, s| {
        s.row() == Row::None
            && s.lives > 0
            && s.flying.iter().any(|each| matches!(each, Some((_, Some(_), _))))
    }),
    (
        "a namespace is created by a statement that was sent again",
        |_, s| matches!(s.row(), Row::Live(number) if s.creates.iter().any(|each| matches!(each, Create::Sent(of, _) if *of == number))),
    ),
    (
        "a deleted namespace has its watermarks, because what deleted it stopped",
        |_, s| matches!(s.row(), Row::Deleted(number, _) if s.watermarks[number]),
    ),
];
