//! Visit every reachable state, breadth first, so that the first violation found is a shortest one.
//!
//! A state is remembered by 64 bits of its hash, with the hash of the state that it was first
//! reached from. The states of one depth are visited by all threads; a depth is finished before the
//! next one begins, so the numbers do not depend on the threads.

use std::collections::hash_map::{Entry, HashMap};
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Mutex;

const SHARDS: usize = 256;

/// What a step is called in a counterexample: who does it, and what.
pub type Label = (&'static str, &'static str);

/// The name of an interesting situation, and whether a state is in it.
pub type Situation<M> = (&'static str, fn(&M, &<M as Model>::State) -> bool);

/// A protocol: its initial state, its steps, and what must hold in every state.
pub trait Model: Sync + Sized + 'static {
    type State: Clone + Eq + Hash + Debug + Send + Sync;

    /// Situations that some scenario must reach.
    const SITUATIONS: &'static [Situation<Self>];

    fn initial(&self) -> Self::State;

    /// Append each state that one step leads to.
    fn steps(&self, state: &Self::State, out: &mut Vec<(Label, Self::State)>);

    /// Return which promise *state* breaks, if any, and *before* did not.
    fn violation(&self, before: &Self::State, state: &Self::State) -> Option<&'static str>;

    /// Describe *state* in a counterexample, in one line.
    fn describe(&self, state: &Self::State) -> String {
        format!("{state:?}")
    }
}

/// The steps to a state that breaks a promise.
pub struct Counterexample {
    pub promise: &'static str,
    pub steps: Vec<(Label, String)>,
}

/// The result of a search.
pub struct Found {
    pub states: usize,
    pub depth: usize,
    /// The names of [`Model::SITUATIONS`] that were reached.
    pub situations: Vec<&'static str>,
    pub counterexample: Option<Counterexample>,
}

/// Search all states, or up to the first depth at which a promise is broken.
pub fn search<M: Model>(model: &M, threads: usize) -> Found {
    let seen = Seen::new();
    let first = model.initial();
    seen.is_new(hash_of(&first), 0);
    let mut found = Found { states: 1, depth: 0, situations: Vec::new(), counterexample: None };
    let mut situations = situations_of(model, &first);
    let mut frontier = vec![first];
    loop {
        let size = (frontier.len() + threads - 1) / threads;
        let parts: Vec<Part<M::State>> = std::thread::scope(|scope| {
            let running: Vec<_> =
                frontier.chunks(size).map(|states| scope.spawn(|| visit(model, &seen, states))).collect();
            running.into_iter().map(|each| each.join().unwrap()).collect()
        });
        let mut wrong: Option<(u64, &'static str)> = None;
        frontier = Vec::new();
        for part in parts {
            situations |= part.situations;
            found.states += part.next.len();
            frontier.extend(part.next);
            // The least hash, so that every run shows the same one.
            wrong = wrong.into_iter().chain(part.wrong).min();
        }
        found.situations = names_of::<M>(situations);
        if let Some((hash, promise)) = wrong {
            let steps = replay(model, &seen.path(hash));
            found.depth = steps.len();
            found.counterexample = Some(Counterexample { promise, steps });
            return found;
        }
        if frontier.is_empty() {
            return found;
        }
        found.depth += 1;
    }
}

/// Return a bit for each situation that *state* is in.
fn situations_of<M: Model>(model: &M, state: &M::State) -> u64 {
    let each = M::SITUATIONS.iter().enumerate();
    each.fold(0, |bits, (at, (_, is_in))| bits | u64::from(is_in(model, state)) << at)
}

fn names_of<M: Model>(bits: u64) -> Vec<&'static str> {
    let each = M::SITUATIONS.iter().enumerate();
    each.filter(|(at, _)| bits >> at & 1 == 1).map(|(_, (name, _))| *name).collect()
}

/// What a thread found from its share of the states of one depth.
struct Part<S> {
    next: Vec<S>,
    situations: u64,
    wrong: Option<(u64, &'static str)>,
}

fn visit<M: Model>(model: &M, seen: &Seen, states: &[M::State]) -> Part<M::State> {
    let mut part = Part { next: Vec::new(), situations: 0, wrong: None };
    let mut out = Vec::new();
    for state in states {
        let from = hash_of(state);
        model.steps(state, &mut out);
        for (_, next) in out.drain(..) {
            let hash = hash_of(&next);
            if !seen.is_new(hash, from) {
                continue;
            }
            part.situations |= situations_of(model, &next);
            if let Some(promise) = model.violation(state, &next) {
                part.wrong = part.wrong.into_iter().chain([(hash, promise)]).min();
            }
            part.next.push(next);
        }
    }
    part
}

/// Return the steps whose states have the hashes *path*.
fn replay<M: Model>(model: &M, path: &[u64]) -> Vec<(Label, String)> {
    let mut state = model.initial();
    let mut steps = Vec::new();
    for hash in &path[1..] {
        let mut out = Vec::new();
        model.steps(&state, &mut out);
        let (label, next) = out
            .into_iter()
            .find(|(_, next)| hash_of(next) == *hash)
            .expect("a model's steps depend on its state alone");
        steps.push((label, model.describe(&next)));
        state = next;
    }
    steps
}

pub fn hash_of<S: Hash>(state: &S) -> u64 {
    let mut hasher = Mixing(0x9e37_79b9_7f4a_7c15);
    state.hash(&mut hasher);
    hasher.finish()
}

/// Hashes of the states that were reached, each with the hash of the one before it.
struct Seen {
    shards: Vec<Mutex<HashMap<u64, u64, BuildHasherDefault<Hashed>>>>,
}

impl Seen {
    fn new() -> Seen {
        Seen { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Remember *hash*, which is reached from *from*; return whether it is new.
    fn is_new(&self, hash: u64, from: u64) -> bool {
        let mut shard = self.shards[hash as usize % SHARDS].lock().unwrap();
        match shard.entry(hash) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(from);
                true
            }
        }
    }

    /// Return the hashes from the initial state to *hash*.
    fn path(&self, mut hash: u64) -> Vec<u64> {
        let mut path = Vec::new();
        while hash != 0 {
            path.push(hash);
            hash = self.shards[hash as usize % SHARDS].lock().unwrap()[&hash];
        }
        path.reverse();
        path
    }
}

/// A fast hash of 64 bits: each word is mixed in by a multiplication to 128 bits, as wyhash does it.
struct Mixing(u64);

impl Hasher for Mixing {
    fn finish(&self) -> u64 {
        let mut last = Mixing(self.0);
        last.write_u64(0x2d35_8dcc_aa6c_78a5);
        last.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_usize(&mut self, length: usize) {
        self.write_u64(length as u64);
    }

    fn write_u64(&mut self, word: u64) {
        let mixed = u128::from(self.0 ^ word ^ 0x8bb8_4b93_962e_acc9) * 0xa076_1d64_78bd_642f;
        self.0 = (mixed as u64 ^ (mixed >> 64) as u64).rotate_left(23);
    }
}

/// The hash of what is a hash already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only hashes are hashed")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash.rotate_left(20);
    }
}
