//! How many holds, adds and requests there are, and how far the clock goes.

use super::{Kind, ADDS, HOLDS};
use crate::times::Time;
use Kind::{Add as Adds, Cancel, Expire, Extend, Hold as Holds, Release, Settle};

pub struct Hold {
    pub time: Time,
    pub amount: i8,
    pub lasts: Time,
}

pub struct Add {
    pub time: Time,
    pub delta: i8,
    pub bounded: bool,
    pub clear: bool,
}

pub struct Scenario {
    pub name: &'static str,
    pub quick: bool,
    pub postgresql: bool,
    /// The bounds of each hold and of each bounded add.
    pub most: i8,
    pub least: i8,
    pub holds: [Hold; HOLDS],
    pub adds: [Add; ADDS],
    /// What is asked for, and of which hold or add: those that are equal are retries.
    pub requests: &'static [(Kind, usize)],
    pub failover: bool,
    /// How often the clock steps back.
    pub back: u8,
    pub horizon: Time,
}

impl Scenario {
    /// Whether there are only bounded adds and holds.
    pub fn is_alone(&self) -> bool {
        let mut adds = self.requests.iter().filter(|each| each.0 == Adds);
        adds.all(|each| self.adds[each.1].bounded)
    }
}

const UP: Hold = Hold { time: 1, amount: 1, lasts: 1 };
const LONG: Hold = Hold { lasts: 2, ..UP };
/// Still open after a clear.
const CLEARED: Hold = Hold { lasts: 3, ..UP };
const DOWN: Hold = Hold { amount: -1, ..UP };
const LATER: Hold = Hold { time: 3, ..UP };
/// Takes the only room.
const TAKE: Add = Add { time: 3, delta: 1, bounded: true, clear: false };
const GIVE: Add = Add { delta: -1, ..TAKE };
const PLAIN: Add = Add { bounded: false, ..TAKE };
const CLEAR: Add = Add { time: 2, delta: 0, bounded: false, clear: true };

const SQLITE: Scenario = Scenario {
    name: "holds, SQLite",
    quick: true,
    postgresql: false,
    most: 1,
    least: 0,
    holds: [UP, LATER],
    adds: [TAKE, PLAIN],
    requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Release, 0), (Adds, 0)],
    failover: false,
    back: 1,
    horizon: 3,
};

const POSTGRESQL: Scenario = Scenario {
    name: "holds, PostgreSQL",
    postgresql: true,
    requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Release, 0), (Adds, 0)],
    ..SQLITE
};

pub const SCENARIOS: &[Scenario] = &[
    SQLITE,
    Scenario {
        name: "holds, SQLite, extended",
        holds: [LONG, LATER],
        requests: &[(Holds, 0), (Settle(1), 0), (Extend, 0), (Extend, 0), (Expire, 0)],
        horizon: 4,
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, cancel",
        requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Cancel, 0), (Cancel, 0)],
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, two",
        requests: &[(Holds, 0), (Holds, 1), (Settle(2), 0), (Release, 1), (Adds, 0)],
        back: 0,
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, down",
        holds: [UP, DOWN],
        adds: [GIVE, TAKE],
        requests: &[(Holds, 0), (Holds, 1), (Settle(-1), 0), (Settle(-1), 1), (Adds, 0), (Adds, 1)],
        back: 0,
        horizon: 2,
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, clear",
        holds: [CLEARED, CLEARED],
        adds: [PLAIN, CLEAR],
        requests: &[(Holds, 0), (Holds, 1), (Settle(1), 0), (Adds, 1)],
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, more",
        quick: false,
        holds: [LONG, LATER],
        requests: &[(Holds, 0), (Holds, 0), (Holds, 1), (Settle(2), 0), (Extend, 0), (Cancel, 0), (Adds, 0)],
        horizon: 4,
        ..SQLITE
    },
    Scenario {
        name: "holds, SQLite, down, longer",
        quick: false,
        holds: [UP, DOWN],
        adds: [GIVE, TAKE],
        requests: &[(Holds, 0), (Holds, 1), (Settle(-1), 0), (Settle(-1), 1), (Adds, 0), (Adds, 1)],
        ..SQLITE
    },
    POSTGRESQL,
    Scenario {
        name: "holds, PostgreSQL, cancel",
        requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Cancel, 0), (Cancel, 0)],
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, extended",
        holds: [LONG, LATER],
        requests: &[(Holds, 0), (Settle(1), 0), (Extend, 0), (Extend, 0), (Expire, 0)],
        horizon: 4,
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, clear",
        holds: [CLEARED, CLEARED],
        adds: [PLAIN, CLEAR],
        requests: &[(Holds, 0), (Holds, 1), (Settle(1), 0), (Adds, 1)],
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, failover",
        requests: &[(Holds, 0), (Settle(1), 0), (Release, 0), (Adds, 0)],
        failover: true,
        horizon: 2,
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, failover, extended",
        requests: &[(Holds, 0), (Settle(1), 0), (Extend, 0), (Extend, 0), (Expire, 0)],
        failover: true,
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, failover, cancel",
        quick: false,
        requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Cancel, 0), (Cancel, 0), (Adds, 0)],
        failover: true,
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, more",
        quick: false,
        holds: [LONG, LATER],
        requests: &[(Holds, 0), (Holds, 0), (Holds, 1), (Settle(2), 0), (Extend, 0), (Cancel, 0), (Adds, 0)],
        horizon: 4,
        ..POSTGRESQL
    },
    Scenario {
        name: "holds, PostgreSQL, failover, more",
        quick: false,
        requests: &[(Holds, 0), (Holds, 0), (Settle(1), 0), (Release, 0), (Extend, 0), (Adds, 0)],
        failover: true,
        ..POSTGRESQL
    },
];
