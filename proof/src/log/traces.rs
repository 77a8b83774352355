//! What can be observed of one item of an add, from outside and in the store: `LETTERS`.
//!
//! `prove --traces` writes the automaton of all sequences that the model allows. The simulation
//! checks against it what it observed of each add.

use super::scenarios::Scenario;
use super::state::{Outcome, State, Time, Times};
use super::{Log, WINDOW, WRITE_TIMEOUT};
use crate::automaton::{Letter, Steps};
use crate::checker::Model;
use crate::rules::Rule;

const ASKED: Letter = 0;
const MARKED: Letter = 1;
const SENT: Letter = 2;
const LANDED: Letter = 3;
const HIDDEN: Letter = 4;
const SHOWN_AGAIN: Letter = 5;
const APPLIED: Letter = 6;
const VOID: Letter = 7;
const PENDING: Letter = 8;
const RECOUNT: Letter = 9;
const PASSED: Letter = 10;
const LATE: Letter = 11;
const CLOSED: Letter = 12;
const REPORTED_APPLIED: Letter = 13;
const REPORTED_VOID: Letter = 14;
const COUNTED: Letter = 15;
const NOT_COUNTED: Letter = 16;

/// The name of each letter, and what is observed. Each is observed once.
pub const LETTERS: &[(&str, &str)] = &[
    ("asked", "a client sends a request with the token"),
    ("marked", "after that: the mark of the counter's window is durable"),
    ("sent", "a process has checked the age of the token, and sends its event"),
    ("landed", "every quorum sees the event"),
    ("hidden", "no quorum sees the event, however late a write of it lands"),
    ("shown-again", "every quorum sees the event although it was hidden"),
    ("applied", "it is decided that the token counts"),
    ("void", "it is decided that the token never counts"),
    ("pending", "after the decision is carried out: a recount is pending for readers"),
    ("recount", "after that: a recount is marked for the worker, in a window that it has not passed"),
    ("passed", "the watermark passes the window"),
    ("late", "no clock within the bound lets the event be sent any more"),
    ("closed", "the first clock within the bound may find the window closed"),
    ("reported-applied", "a client gets the answer that the token counts"),
    ("reported-void", "a client gets the answer that the token never counts"),
    ("counted", "the last: all is quiet and rolled up, and the count has the item"),
    ("not-counted", "the last: all is quiet and rolled up, and the count does not have the item"),
];

/// Adds of one item, and atomic ones. Longer scenarios, and more requests, have the same automaton.
pub const SINGLE: Scenario =
    Scenario { name: "single", skew: 1, accept_limit: 0, horizon: 4, ..super::scenarios::ONE };
pub const ATOMIC: Scenario = Scenario { name: "atomic", atomic: true, quick: false, ..SINGLE };

/// A state, and what was observed until then; None after the last observation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Watched(Option<(State, u32)>);

pub fn first(log: &Log) -> Watched {
    Watched(Some((log.initial(), 0)))
}

/// The steps of the model, and those that only observe: of the first item of the first token.
pub fn steps(log: &Log, watched: &Watched) -> Steps<Watched> {
    let mut found = Vec::new();
    let Some((state, seen)) = &watched.0 else { return found };
    let mut out = Vec::new();
    log.steps(state, &mut out);
    for ((who, what), next) in out {
        if who == "request" && !has(*seen, ASKED) {
            continue;
        }
        let letter = letter_of(log, state, &next, what, *seen).filter(|letter| !has(*seen, *letter));
        let seen = letter.map_or(*seen, |letter| seen | 1 << letter);
        found.push((letter, Watched(Some((next, seen)))));
    }
    let is_reported =
        [(ASKED, true), (REPORTED_APPLIED, state.acknowledged[0]), (REPORTED_VOID, state.refused[0])];
    for (letter, _) in is_reported.into_iter().filter(|(letter, is_so)| *is_so && !has(*seen, *letter)) {
        found.push((Some(letter), Watched(Some((state.clone(), seen | 1 << letter)))));
    }
    for last in [false, true] {
        let quiet = log.quiet(state, last).expect("all rules that a worker needs to finish are kept");
        match log.read(&quiet, 0).0[0] {
            0 => found.push((Some(NOT_COUNTED), Watched(None))),
            1 => found.push((Some(COUNTED), Watched(None))),
            _ => {}
        }
    }
    found
}

fn has(seen: u32, letter: Letter) -> bool {
    seen >> letter & 1 == 1
}

fn gains(before: Times, mut after: Times) -> bool {
    after.remove(before);
    after.has_any()
}

/// What is observed of a step.
fn letter_of(log: &Log, before: &State, after: &State, what: &str, seen: u32) -> Option<Letter> {
    let time = log.scenario.tokens[0];
    let (head, next) = (&before.counters[0].head, &after.counters[0].head);
    // As all rules say it, even if one is broken.
    let late = time + log.scenario.accept_limit + log.scenario.skew + 1;
    let closed = time + WINDOW + log.scenario.accept_limit + WRITE_TIMEOUT + log.scenario.skew;
    let crosses = |least: Time| before.now < least && least <= after.now;
    let recounts = (before.counters[0].recounts[0], after.counters[0].recounts[0]);
    let is_enforced = match after.decided[0] {
        Some(Outcome::Void) => has(seen, HIDDEN),
        Some(Outcome::Applied) => has(seen, LANDED),
        Some(Outcome::Cancelled(_)) | None => false,
    };
    let observations = [
        (what == "arrives, and has its mark" && !log.breaks(Rule::MarkBeforeEvent), MARKED),
        (what == "sends its event", SENT),
        (!before.landed[0] && after.landed[0] && !has(seen, HIDDEN), LANDED),
        (!before.landed[0] && after.landed[0] && has(seen, HIDDEN), SHOWN_AGAIN),
        (!before.hidden[0] && after.hidden[0], HIDDEN),
        (before.decided[0] != after.decided[0] && after.decided[0] == Some(Outcome::Applied), APPLIED),
        (before.decided[0] != after.decided[0] && after.decided[0] == Some(Outcome::Void), VOID),
        (is_enforced && gains(head.pending[0], next.pending[0]), PENDING),
        (has(seen, PENDING) && gains(recounts.0, recounts.1), RECOUNT),
        (before.watermarks[0] < time && time <= after.watermarks[0], PASSED),
        (crosses(late), LATE),
        (crosses(closed), CLOSED),
    ];
    let mut made = observations.iter().filter(|each| each.0).map(|each| each.1);
    let first = made.next();
    assert!(made.next().is_none(), "{what}: two observations of one step");
    first
}
