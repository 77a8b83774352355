//! What can be observed of one item of an add over PostgreSQL: `LETTERS`. Each is observed once.
//!
//! The tests of drawn orders look at the tables after each transaction, and compare what became of
//! each add with the automaton of this.

use super::{Decision, Fence, State, Step, Time, Worker, ACCEPT_LIMIT, TOKEN, WINDOW};
use crate::automaton::{Letter, Steps};
use crate::checker::Model;

const ASKED: Letter = 0;
const STORED: Letter = 1;
const OPEN: Letter = 2;
const APPLIED: Letter = 3;
const VOID: Letter = 4;
const FENCED: Letter = 5;
const PASSED: Letter = 6;
const LATE: Letter = 7;
const CLOSED: Letter = 8;
const REPORTED_APPLIED: Letter = 9;
const REPORTED_VOID: Letter = 10;
const COUNTED: Letter = 11;
const NOT_COUNTED: Letter = 12;

/// The name of each letter, and what is observed.
pub const LETTERS: &[(&str, &str)] = &[
    ("asked", "a client sends a request with the token"),
    ("stored", "a transaction that inserted the event commits"),
    ("open", "it is noted that a decision about the token is open"),
    ("applied", "it is decided that the token counts"),
    ("void", "it is decided that the token never counts"),
    ("fenced", "the fence is so late that the window may be closed"),
    ("passed", "the watermark passes the window"),
    ("late", "the server's clock never lets the event be stored any more"),
    ("closed", "the first clock may find the window closed"),
    ("reported-applied", "a client gets the answer that the token counts"),
    ("reported-void", "a client gets the answer that the token never counts"),
    ("counted", "the last: all is quiet and rolled up, and the count has the item"),
    ("not-counted", "the last: all is quiet and rolled up, and the count does not have the item"),
];

const CLOSES: Time = TOKEN + WINDOW + ACCEPT_LIMIT;
/// A third request has the same automaton.
const REQUESTS: usize = 2;

/// A state, and what was observed until then; None after the last observation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Watched(Option<(State, u32)>);

pub fn first(fence: &Fence) -> Watched {
    let mut state = fence.initial();
    state.requests[REQUESTS..].fill(Step::Over);
    Watched(Some((state, 0)))
}

/// The steps of the model, and those that only observe.
pub fn steps(fence: &Fence, watched: &Watched) -> Steps<Watched> {
    let mut found = Vec::new();
    let Some((state, seen)) = &watched.0 else { return found };
    let mut out = Vec::new();
    fence.steps(state, &mut out);
    for ((who, what), next) in out {
        if may_follow(state, &next, who, what, *seen) {
            let letter = letter_of(state, &next);
            let seen = letter.map_or(*seen, |letter| *seen | 1 << letter);
            found.push((letter, Watched(Some((next, seen)))));
        }
    }
    let is_seen = [
        (ASKED, true),
        // In either order: a clock that is behind may let it be stored although another one finds
        // its window closed.
        (LATE, state.now > TOKEN + ACCEPT_LIMIT),
        (CLOSED, state.now >= CLOSES),
        (REPORTED_APPLIED, state.acknowledged),
        (REPORTED_VOID, state.refused),
    ];
    for (letter, _) in is_seen.into_iter().filter(|(letter, is_so)| *is_so && !has(*seen, *letter)) {
        found.push((Some(letter), Watched(Some((state.clone(), seen | 1 << letter)))));
    }
    // Everything stops, and a worker sums what is not summed.
    let is_counted = if state.passed >= TOKEN { state.counted } else { state.stored };
    found.push((Some(if is_counted { COUNTED } else { NOT_COUNTED }), Watched(None)));
    found
}

fn has(seen: u32, letter: Letter) -> bool {
    seen >> letter & 1 == 1
}

/// Whether a step is possible after what was observed.
fn may_follow(before: &State, after: &State, who: &str, what: &str, seen: u32) -> bool {
    let fresh = |state: &State| state.requests.iter().filter(|each| **each == Step::Fresh).count();
    let is_closing = match (what, after.worker) {
        ("moves the fence", Worker::Waiting(fence, _)) => fence >= CLOSES,
        _ => what == "finds nothing in a closed window",
    };
    let is_asked = who != "request" || has(seen, ASKED);
    let is_in_time = !has(seen, LATE) || fresh(after) <= fresh(before);
    is_asked && is_in_time && (!is_closing || has(seen, CLOSED))
}

/// What is observed of a step.
fn letter_of(before: &State, after: &State) -> Option<Letter> {
    let decided = |outcome| before.decision != after.decision && after.decision == Some(outcome);
    let crosses = |least: Time, before: Time, after: Time| before < least && least <= after;
    let observations = [
        (!before.stored && after.stored, STORED),
        (decided(Decision::Open), OPEN),
        (decided(Decision::Applied), APPLIED),
        (decided(Decision::Void), VOID),
        (crosses(CLOSES, before.fence, after.fence), FENCED),
        (crosses(TOKEN, before.passed, after.passed), PASSED),
    ];
    let mut made = observations.iter().filter(|each| each.0).map(|each| each.1);
    let first = made.next();
    assert!(made.next().is_none(), "two observations of one step");
    first
}
