//! Instants, in ticks, and sets of them.

pub type Time = i8;

/// A set of instants.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Times(u32);

impl Times {
    pub fn add(&mut self, time: Time) {
        assert!((0..32).contains(&time), "instant {time}");
        self.0 |= 1 << time;
    }

    pub fn remove(&mut self, others: Times) {
        self.0 &= !others.0;
    }

    pub fn with(self, others: Times) -> Times {
        Times(self.0 | others.0)
    }

    pub fn has(self, time: Time) -> bool {
        self.0 >> time & 1 == 1
    }

    pub fn has_any(self) -> bool {
        self.0 != 0
    }

    /// Return those in `(after, through]`.
    pub fn between(self, after: Time, through: Time) -> Times {
        let up_to = |time: Time| ((1_u64 << (time.max(-1) + 1)) - 1) as u32;
        Times(self.0 & up_to(through) & !up_to(after))
    }

    pub fn first(self) -> Option<Time> {
        self.all().next()
    }

    pub fn last(self) -> Option<Time> {
        self.all().last()
    }

    pub fn all(self) -> impl Iterator<Item = Time> {
        (0..32).filter(move |time| self.0 & 1 << time != 0)
    }
}

impl std::fmt::Debug for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_set().entries(self.all()).finish()
    }
}
