//! What a request does under the lock of the counter, by a clock that is read under it.

use super::{Answer, Change, Decision, End, Held, HeldChange, Holds, Kind, Outcome, Place, Store, Work};
use super::{ADDS, HOLDS, ONCE};
use crate::rules::Rule;
use crate::times::Time;

impl Holds {
    /// Do what the request *at* asks for in *work*. The token of a hold or an add is in time.
    pub(super) fn act(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let subject = self.subject(at);
        match self.kind(at) {
            Kind::Hold => self.hold(work, subject, now),
            Kind::Settle(amount) => self.end(work, subject, now, Outcome::Settled(amount)),
            Kind::Release => self.end(work, subject, now, Outcome::Released),
            Kind::Extend => self.extend(work, subject, now),
            Kind::Expire => self.expire(work, subject, now),
            Kind::Cancel => self.cancel(work, subject, now),
            Kind::Add => self.add(work, subject, now),
        }
    }

    fn hold(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let amount = self.scenario.holds[at].amount;
        if self.breaks(Rule::HoldIdentityFirst) && self.is_past(&work.store, amount, true) {
            return Answer::Refused(self.read(&work.store)[0]);
        }
        if let Some(answer) = self.stored(&work.store.holds[at]) {
            return answer;
        }
        let is_erased = self.is_erased(&work.store, self.scenario.holds[at].time);
        let is_free = is_erased && self.breaks(Rule::HoldErasedDecided);
        if let Some(count) = self.admit(work, amount, now, true, is_free) {
            work.store.holds[at].place = Place::Refused(count);
            return Answer::Refused(count);
        }
        let until = now + self.scenario.holds[at].lasts;
        let held = &mut work.store.holds[at];
        (held.place, held.open) = (Place::Accepted, Some(until));
        Answer::Held(None, until)
    }

    fn add(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let add = &self.scenario.adds[at];
        let refused = match work.store.adds[at] {
            Place::Empty if !add.bounded || self.is_erased(&work.store, add.time) => None,
            Place::Empty => self.admit(work, add.delta, now, false, false),
            Place::Refused(count) => Some(count),
            Place::Accepted => return Answer::Accepted,
        };
        work.store.adds[at] = refused.map_or(Place::Accepted, Place::Refused);
        refused.map_or(Answer::Accepted, Answer::Refused)
    }

    /// What is stored of a hold: its events, then its end.
    pub(super) fn stored(&self, held: &Held) -> Option<Answer> {
        let end = held.end.map(|end| end.outcome).filter(|_| !self.breaks(Rule::HoldRetrySaysEnd));
        let until = if end.is_none() { held.open.unwrap_or(0) } else { 0 };
        match held.place {
            Place::Empty => None,
            Place::Accepted => Some(Answer::Held(end, until)),
            Place::Refused(count) => Some(Answer::Refused(count)),
        }
    }

    /// What is decided of a hold's token for good.
    pub(super) fn decided(&self, held: &Held) -> Option<Answer> {
        match held.decision {
            Some(Decision::Void) => Some(Answer::Void),
            Some(Decision::Cancelled(was_counted)) => Some(Answer::Cancelled(was_counted)),
            _ => None,
        }
    }

    fn is_erased(&self, store: &Store, time: Time) -> bool {
        let mut adds = (0..ADDS).filter(|at| store.adds[*at] == Place::Accepted);
        adds.any(|at| self.scenario.adds[at].clear && self.scenario.adds[at].time >= time)
    }

    /// Whether *amount* brings the count with the open holds that go the same way past a bound.
    fn is_past(&self, store: &Store, amount: i8, is_hold: bool) -> bool {
        let [count, mut up, mut down] = self.read(store);
        if self.breaks(Rule::HoldApart) {
            (up, down) = (up + down, up + down);
        }
        if self.breaks(Rule::HoldCountsForAdds) && !is_hold {
            (up, down) = (0, 0);
        }
        self.is_beyond(amount, [count, up, down])
    }

    fn is_beyond(&self, amount: i8, [count, up, down]: super::Counts) -> bool {
        amount > 0 && count + up + amount > self.scenario.most
            || amount < 0 && count + down + amount < self.scenario.least
    }

    /// Return the count that refuses *amount*, if it has no room after expired holds are ended.
    fn admit(&self, work: &mut Work, amount: i8, now: Time, is_hold: bool, is_free: bool) -> Option<i8> {
        let mut is_past = !is_free && self.is_past(&work.store, amount, is_hold);
        let is_expired = |held: &Held| held.open.is_some_and(|until| until <= now);
        let left = |store: &Store| {
            let [_, up, down] = self.open_sum(store, Some(now));
            [self.truth(store)[0], up, down]
        };
        let room = !self.is_beyond(amount, left(&work.store));
        if is_past && self.breaks(Rule::HoldExpiryByAdds) {
            is_past = self.is_beyond(amount, left(&work.store));
        } else if is_past && !self.breaks(Rule::HoldExpiredGivesRoom) {
            for at in (0..HOLDS).filter(|at| is_expired(&work.store.holds[*at])).collect::<Vec<_>>() {
                self.write_end(work, at, now, Outcome::Expired);
            }
            is_past = self.is_past(&work.store, amount, is_hold);
        }
        let [_, up, down] = self.open_sum(&work.store, None);
        let is_wrong = self.is_beyond(amount, [self.truth(&work.store)[0], up, down]);
        if !is_past && is_wrong {
            work.wrong = Some("an accepted add or hold keeps its bound, beside the open holds");
        }
        if is_past && room {
            work.wrong = Some("an add or hold is refused only if it has no room beside holds in time");
        }
        is_past.then_some(self.read(&work.store)[0])
    }

    /// What ended the hold, as the end *wanted* finds it.
    fn known_end(&self, held: &Held, wanted: Outcome) -> Option<Outcome> {
        let end = held.end.filter(|end| held.reserved == Some(end.time)).map(|end| end.outcome);
        let is_own = |end: Outcome| std::mem::discriminant(&end) == std::mem::discriminant(&wanted);
        if self.breaks(Rule::HoldEndOneNonce) {
            end.filter(|end| is_own(*end))
        } else {
            end.filter(|_| !self.breaks(Rule::HoldEndLooked))
        }
    }

    /// Return the answer about a hold that is not there, or refused.
    fn missing(&self, held: &Held) -> Option<Answer> {
        match held.place {
            Place::Empty => Some(self.decided(held).unwrap_or(Answer::Absent)),
            Place::Refused(_) if self.breaks(Rule::HoldRefusedNotEnded) => None,
            Place::Refused(count) => Some(Answer::Refused(count)),
            Place::Accepted => None,
        }
    }

    fn end(&self, work: &mut Work, at: usize, now: Time, wanted: Outcome) -> Answer {
        let held = work.store.holds[at];
        if let Outcome::Settled(amount) = wanted {
            let is_contrary = amount.signum() == -self.scenario.holds[at].amount.signum();
            if is_contrary && !self.breaks(Rule::HoldSettleSameWay) {
                return Answer::Nothing;
            }
        }
        if let Some(answer) = self.missing(&held) {
            return answer;
        }
        if let Some(outcome) = self.known_end(&held, wanted) {
            return Answer::Ended(outcome);
        }
        let is_expired = held.open.is_some_and(|until| until <= now);
        if is_expired && self.breaks(Rule::HoldExpiryWritten) {
            return Answer::Ended(Outcome::Expired);
        }
        if self.breaks(Rule::HoldReservedWithEnd) && held.reserved.is_none() {
            work.store.holds[at].reserved = Some(now);
            return Answer::Again;
        }
        let outcome = if is_expired { Outcome::Expired } else { wanted };
        self.write_end(work, at, now, outcome);
        Answer::Ended(outcome)
    }

    /// Write the events of an end, and reserve their time; the hold is open no more.
    fn write_end(&self, work: &mut Work, at: usize, now: Time, outcome: Outcome) {
        let token = self.scenario.holds[at].time;
        let time = match self.broken {
            Some(Rule::HoldEndOwnTime) => token,
            Some(Rule::HoldEndAfterHold) => now,
            Some(Rule::HoldReservedWithEnd) => work.store.holds[at].reserved.unwrap_or(now),
            _ => now.max(token),
        };
        let held = &mut work.store.holds[at];
        if held.end.is_some() {
            work.wrong = Some(ONCE);
        }
        held.open = None;
        held.reserved = Some(time);
        held.end = Some(End { outcome, time });
    }

    /// The worker ends a hold that it has found expired.
    fn expire(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let is_blind = self.breaks(Rule::HoldWorkerLooksAgain);
        if work.store.holds[at].open.is_some_and(|until| until <= now || is_blind) {
            self.write_end(work, at, now, Outcome::Expired);
        }
        Answer::Nothing
    }

    fn extend(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let held = work.store.holds[at];
        if let Some(answer) = self.missing(&held) {
            return answer;
        }
        let until = now + self.scenario.holds[at].lasts;
        match (held.end, held.open) {
            (Some(end), _) if !self.breaks(Rule::HoldExtensionRevives) => Answer::Ended(end.outcome),
            (None, Some(known)) if known <= now => {
                self.write_end(work, at, now, Outcome::Expired);
                Answer::Ended(Outcome::Expired)
            }
            (_, known) => {
                let is_longer = Some(until) > known || self.breaks(Rule::HoldExtensionShortens);
                let until = if is_longer { until } else { known.unwrap_or(until) };
                work.store.holds[at].open = Some(until);
                Answer::Extended(until)
            }
        }
    }

    /// A cancel of the hold's token: a release, or the decision that it never comes.
    fn cancel(&self, work: &mut Work, at: usize, now: Time) -> Answer {
        let held = &mut work.store.holds[at];
        let is_removed = held.place == Place::Accepted && self.breaks(Rule::HoldCancelReleases);
        match held.decision {
            Some(Decision::Cancelled(was_counted)) => Answer::Cancelled(was_counted),
            _ if held.place != Place::Accepted || is_removed => {
                held.place = Place::Empty;
                held.open = None;
                held.decision = Some(Decision::Cancelled(is_removed));
                Answer::Cancelled(is_removed)
            }
            _ => {
                let is_new = held.end.is_none();
                match self.end(work, at, now, Outcome::Released) {
                    Answer::Ended(Outcome::Released)
                        if is_new || !self.breaks(Rule::HoldCancelOfReleased) =>
                    {
                        Answer::Cancelled(true)
                    }
                    answer => answer,
                }
            }
        }
    }

    /// What has changed from *before* to *after*.
    pub(super) fn change(&self, before: &Store, after: &Store) -> Change {
        let mut change = Change::default();
        for at in 0..HOLDS {
            let (old, new) = (&before.holds[at], &after.holds[at]);
            change.holds[at] = HeldChange {
                place: Some(new.place).filter(|place| *place != old.place),
                decision: new.decision.filter(|_| new.decision != old.decision),
                open: Some(new.open).filter(|open| *open != old.open),
                reserved: new.reserved.filter(|_| new.reserved != old.reserved),
                end: new.end.filter(|_| new.end != old.end),
            };
        }
        for at in 0..ADDS {
            change.adds[at] = Some(after.adds[at]).filter(|place| *place != before.adds[at]);
        }
        change
    }

    /// A transaction becomes visible. Return what is wrong with that.
    pub(super) fn merge(&self, store: &mut Store, change: &Change) -> Option<&'static str> {
        let mut wrong = None;
        for at in 0..HOLDS {
            let (held, change) = (&mut store.holds[at], &change.holds[at]);
            let is_cancelled = matches!(held.decision, Some(Decision::Cancelled(_)));
            held.place = change.place.unwrap_or(held.place);
            held.decision = change.decision.filter(|_| !is_cancelled).or(held.decision);
            held.open = change.open.unwrap_or(held.open);
            held.reserved = change.reserved.or(held.reserved);
            if change.end.is_some() && held.end.is_some() {
                wrong = Some(ONCE);
            }
            held.end = change.end.or(held.end);
        }
        for at in 0..ADDS {
            store.adds[at] = change.adds[at].unwrap_or(store.adds[at]);
        }
        wrong
    }
}
