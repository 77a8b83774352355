//! Accurate reads (counter/core/read.py).

use super::state::{Count, Head, Outcome, Reader, State, Time, TWO};
use super::{Item, Log, FUTURE_LIMIT};
use crate::checker::Label;
use crate::rules::Rule;

impl Log {
    /// Append the steps of the reader of counter 0.
    pub fn reader_steps(&self, s: &State, out: &mut Vec<(Label, State)>) {
        if !self.scenario.reader {
            return;
        }
        let mut push = |what: &'static str, reader: Reader| {
            let mut state = s.clone();
            state.reader = reader;
            out.push((("reader", what), state));
        };
        match s.reader {
            Reader::New => {
                let owed = self.per_item(&s.acknowledged);
                let refused = self.per_item(&self.never_counts(s));
                if self.breaks(Rule::WatermarkBeforeHead) {
                    push("reads the head", Reader::HeadFirst { head: s.counters[0].head, owed, refused });
                } else {
                    push(
                        "reads the watermark",
                        Reader::Watermarked { watermark: s.watermarks[0], owed, refused },
                    );
                }
            }
            Reader::HeadFirst { head, owed, refused } => {
                push(
                    "reads the watermark",
                    Reader::Headed { watermark: s.watermarks[0], head, owed, refused },
                );
            }
            Reader::Watermarked { watermark, owed, refused } => {
                let head = s.counters[0].head;
                push("reads the head", Reader::Headed { watermark, head, owed, refused });
            }
            Reader::Headed { watermark, head, owed, refused } => {
                if self.must_recount(&head, watermark) {
                    let rows = s.counters[0].rows;
                    push("reads the rows", Reader::Rowed { watermark, head, rows, owed, refused });
                } else {
                    let as_of = watermark.max(head.checkpoint.0);
                    let count = head.checkpoint.1;
                    push("takes the checkpoint", Reader::Stored { as_of, count, owed, refused });
                }
            }
            Reader::Rowed { watermark, head, rows, owed, refused } => {
                let moved = s.counters[0].head.settled.0 != head.settled.0;
                let recounts = self.recounts_of(&head.pending, head.settled.0, watermark, s.dropped_before);
                let is_missing = |(window, time)| recounts[window] && self.is_missing(s, time);
                let gone = self.windows().any(is_missing);
                let moved = moved && !self.breaks(Rule::HeadReadAgain);
                if moved || gone {
                    let head = s.counters[0].head;
                    push("begins again", Reader::Headed { watermark, head, owed, refused });
                } else {
                    let (as_of, count) = self.fold(s, 0, &head, &rows, watermark);
                    push("sums what is pending", Reader::Stored { as_of, count, owed, refused });
                }
            }
            Reader::Stored { as_of, .. } if self.is_missing(s, as_of + 1) => {
                push("finds that its tail was dropped", Reader::New)
            }
            Reader::Stored { as_of, count, owed, refused } => {
                for reading in self.readings(s.now) {
                    let mut state = s.clone();
                    state.reader = Reader::New;
                    let count = count.plus(self.tail(s, 0, as_of, self.tail_end(reading)));
                    state.misread |= !self.may_read(s, count, &owed, &refused, 0);
                    out.push((("reader", "adds the tail, and answers"), state));
                }
            }
        }
    }

    /// The tokens of which a client knows that they count nothing.
    fn never_counts(&self, s: &State) -> [bool; TWO] {
        [0, 1].map(|token| s.refused[token] || s.cancelled[token].is_some())
    }

    fn per_item(&self, of_token: &[bool; TWO]) -> [bool; TWO] {
        let mut of_item = [false; TWO];
        for item in &self.items {
            of_item[item.at] = of_token[item.token];
        }
        of_item
    }

    /// Whether *count* of a counter has each of its items that is *owed* once, none that is
    /// *refused* or erased, and none twice. One that is being cancelled may be in it.
    fn may_read(
        &self,
        s: &State,
        count: Count,
        owed: &[bool; TWO],
        refused: &[bool; TWO],
        counter: usize,
    ) -> bool {
        let is_add = |item: &&Item| item.counter == counter && !self.is_clear(item);
        self.items.iter().filter(is_add).all(|item| {
            let times = count.0[item.at];
            let clear = self.clear_of(item).map(|each| each.at);
            let is_erased = clear.map_or(false, |at| owed[at]);
            let may_be_erased = clear.map_or(false, |at| !refused[at] && self.was_sent(s, at));
            let is_cancelled = s.decided[item.token].map_or(false, Outcome::is_cancelled);
            let least = i8::from(owed[item.at] && !may_be_erased && !is_cancelled);
            let most = i8::from(!refused[item.at] && !is_erased);
            least <= times && times <= most
        })
    }

    /// Whether a write of the item may ever have landed.
    fn was_sent(&self, s: &State, item: usize) -> bool {
        s.sent[item] || s.landed[item] || s.hidden[item]
    }

    /// Whether every counter, if it is read in one moment, is as clients were answered.
    pub fn reads_right(&self, s: &State) -> bool {
        let (owed, refused) = (self.per_item(&s.acknowledged), self.per_item(&self.never_counts(s)));
        (0..TWO).all(|counter| self.may_read(s, self.read(s, counter), &owed, &refused, counter))
    }

    /// An accurate read in one moment, by a right clock.
    pub fn read(&self, s: &State, counter: usize) -> Count {
        let head = &s.counters[counter].head;
        let watermark = s.watermarks[self.shard_of(counter)];
        let (as_of, count) = if self.must_recount(head, watermark) {
            self.fold(s, counter, head, &s.counters[counter].rows, watermark)
        } else {
            (watermark.max(head.checkpoint.0), head.checkpoint.1)
        };
        count.plus(self.tail(s, counter, as_of, self.tail_end(s.now)))
    }

    /// `CountReader._stored`: whether a pending recount asks to sum a window again.
    fn must_recount(&self, head: &Head, watermark: Time) -> bool {
        let as_of = watermark.max(head.checkpoint.0);
        let wanted = self.recounts_of(&head.pending, head.settled.0, as_of, 0);
        wanted != [false; TWO] && !self.breaks(Rule::ReaderRecounts)
    }

    /// `CountReader._whole`: settled, and the rows up to the watermark; pending windows are summed
    /// again. Returns how far it reaches, and the count.
    fn fold(
        &self,
        s: &State,
        counter: usize,
        head: &Head,
        rows: &[Option<Count>; TWO],
        watermark: Time,
    ) -> (Time, Count) {
        let mut as_of = watermark.max(head.settled.0);
        if self.breaks(Rule::RowsUpToWatermark) {
            as_of = as_of.max(head.checkpoint.0);
        }
        let wanted = self.recounts_of(&head.pending, head.settled.0, as_of, s.dropped_before);
        let mut count = head.settled.1;
        for (window, time) in self.windows() {
            let is_settled = time <= head.settled.0;
            if wanted[window] {
                count = count.plus(self.sum_of(s, counter, window));
            } else if !is_settled && time <= as_of {
                count = count.plus(rows[window].unwrap_or_default());
            }
        }
        (as_of, count)
    }

    /// `CountReader._tail_end`: later than every event that is acknowledged by now.
    fn tail_end(&self, reading: Time) -> Time {
        if self.breaks(Rule::TailBeyondNow) {
            return reading;
        }
        reading + FUTURE_LIMIT + 2 * self.scenario.skew
    }

    /// `EventStore.tails`: the events in `(after, until]`.
    fn tail(&self, s: &State, counter: usize, after: Time, until: Time) -> Count {
        let mut count = Count::default();
        for (window, time) in self.windows() {
            if after < time && time <= until {
                let mut sum = self.sum_of(s, counter, window);
                if self.breaks(Rule::ClearInTail) {
                    sum = sum.without_clear();
                }
                count = count.plus(sum);
            }
        }
        count
    }
}
