//! The smallest deterministic automaton of what can be observed of a model.
//!
//! Each observation is made once at most, so there are finitely many sequences of them. A state's
//! language is the union of those that its steps lead to: steps that show nothing add the language
//! of their target, others a letter before it. Languages are shared, so equal ones are one state of
//! the automaton, and it is minimal. Every state accepts, because everything may stop at any time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

use crate::checker::hash_of;

pub type Letter = u8;

/// The states of an automaton: of each, its letters in their order, and where they lead.
#[derive(Default)]
pub struct Automaton {
    pub states: Vec<Vec<(Letter, u32)>>,
    known: HashMap<Vec<(Letter, u32)>, u32>,
    unions: HashMap<(u32, u32), u32>,
}

/// Steps of a state: what is observed, if anything, and the state after it.
pub type Steps<S> = Vec<(Option<Letter>, S)>;

impl Automaton {
    /// Return the automaton of what begins in *first*, and its initial state.
    pub fn of<S: Hash>(first: S, steps: impl Fn(&S) -> Steps<S>) -> (Automaton, u32) {
        let edges = explore(first, steps);
        let mut made = Automaton::default();
        let mut language: Vec<u32> = vec![0; edges.len()];
        // Those that a state leads to come before it.
        for component in components(&edges) {
            let mut all = made.state(Vec::new());
            for at in &component {
                for (letter, to) in &edges[*at] {
                    let part = match letter {
                        Some(letter) => {
                            assert!(component.binary_search(&(*to as usize)).is_err(), "not made once");
                            made.state(vec![(*letter, language[*to as usize])])
                        }
                        None if component.binary_search(&(*to as usize)).is_ok() => continue,
                        None => language[*to as usize],
                    };
                    all = made.union(all, part);
                }
            }
            for at in component {
                language[at] = all;
            }
        }
        let initial = language[0];
        (made, initial)
    }

    fn state(&mut self, edges: Vec<(Letter, u32)>) -> u32 {
        if let Some(at) = self.known.get(&edges) {
            return *at;
        }
        let at = self.states.len() as u32;
        self.states.push(edges.clone());
        self.known.insert(edges, at);
        at
    }

    fn union(&mut self, one: u32, other: u32) -> u32 {
        if one == other {
            return one;
        }
        let pair = (one.min(other), one.max(other));
        if let Some(at) = self.unions.get(&pair) {
            return *at;
        }
        let mut merged: BTreeMap<Letter, u32> = self.states[one as usize].iter().copied().collect();
        for (letter, to) in self.states[other as usize].clone() {
            let to = match merged.get(&letter) {
                Some(before) => self.union(*before, to),
                None => to,
            };
            merged.insert(letter, to);
        }
        let at = self.state(merged.into_iter().collect());
        self.unions.insert(pair, at);
        at
    }

    /// Return the states that are reached from *initial*, which becomes the first, in a fixed order.
    pub fn reached(&self, initial: u32) -> Vec<Vec<(Letter, usize)>> {
        let mut order = vec![initial];
        let mut number = HashMap::from([(initial, 0)]);
        let mut at = 0;
        while at < order.len() {
            for (_, to) in &self.states[order[at] as usize] {
                number.entry(*to).or_insert_with(|| {
                    order.push(*to);
                    order.len() - 1
                });
            }
            at += 1;
        }
        let of = |each: &u32| {
            self.states[*each as usize].iter().map(|(letter, to)| (*letter, number[to])).collect()
        };
        order.iter().map(of).collect()
    }
}

/// Return, of each state that is reached, its steps; the initial one is the first.
fn explore<S: Hash>(first: S, steps: impl Fn(&S) -> Steps<S>) -> Vec<Vec<(Option<Letter>, u32)>> {
    let mut number = HashMap::from([(hash_of(&first), 0_u32)]);
    let mut waiting = VecDeque::from([first]);
    let mut edges = Vec::new();
    while let Some(state) = waiting.pop_front() {
        let mut out = Vec::new();
        for (letter, next) in steps(&state) {
            let known = number.len() as u32;
            let at = *number.entry(hash_of(&next)).or_insert_with(|| {
                waiting.push_back(next);
                known
            });
            out.push((letter, at));
        }
        out.sort_unstable();
        out.dedup();
        edges.push(out);
    }
    edges
}

/// Return the strongly connected components by Tarjan's algorithm, each sorted: those that one leads
/// to come before it.
fn components(edges: &[Vec<(Option<Letter>, u32)>]) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let (mut index, mut low) = (vec![NEW; edges.len()], vec![0; edges.len()]);
    let (mut stack, mut is_on) = (Vec::new(), vec![false; edges.len()]);
    let mut found = Vec::new();
    let mut path = vec![(0, 0)];
    let mut next = 0;
    while let Some((at, step)) = path.pop() {
        if step == 0 {
            (index[at], low[at]) = (next, next);
            next += 1;
            stack.push(at);
            is_on[at] = true;
        } else {
            let before = edges[at][step - 1].1 as usize;
            low[at] = low[at].min(low[before]);
        }
        let mut deeper = None;
        for (place, (_, to)) in edges[at].iter().enumerate().skip(step) {
            let to = *to as usize;
            if index[to] == NEW {
                deeper = Some((place, to));
                break;
            }
            if is_on[to] {
                low[at] = low[at].min(index[to]);
            }
        }
        if let Some((place, to)) = deeper {
            path.push((at, place + 1));
            path.push((to, 0));
        } else if low[at] == index[at] {
            let begin = stack.iter().rposition(|each| *each == at).unwrap();
            let mut component = stack.split_off(begin);
            component.iter().for_each(|each| is_on[*each] = false);
            component.sort_unstable();
            found.push(component);
        }
    }
    found
}
