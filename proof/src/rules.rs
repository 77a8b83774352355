//! The rules of docs/architecture.md, each of which can be broken to see what it is for.

/// Declare the rules: a variant, its name on the command line, and what is broken.
macro_rules! rules {
    ($($variant:ident, $name:literal, $broken:literal;)*) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Rule { $($variant,)* }

        /// Every rule, in the order of the documents.
        pub const ALL: &[Rule] = &[$(Rule::$variant,)*];

        impl Rule {
            pub fn name(self) -> &'static str {
                match self { $(Rule::$variant => $name,)* }
            }

            /// What happens if the rule is broken.
            pub fn broken(self) -> &'static str {
                match self { $(Rule::$variant => $broken,)* }
            }
        }
    };
}

rules! {
    // An add: EventWriter.write_admitted, MarkMemory (counter/core/write.py)
    MarkBeforeEvent, "mark-before-event", "an event is written before its mark is durable: it is not waited for, or remembered too early";
    SecondAgeCheck, "second-age-check", "the age of a token is not checked after its mark";
    Deadline, "deadline", "a write is acknowledged however long it took";
    DeadlineClockFirst, "deadline-clock-first", "the deadline's clock is read after the age check's";
    ClockGuard, "clock-guard", "a process goes on with a clock that is off by more than the bound";
    // Windows: closes_at, closed_through, closing_lag (counter/windows.py)
    AcceptLimitInClosing, "accept-limit-in-closing", "a window closes without the accept limit";
    WriteTimeoutInClosing, "write-timeout-in-closing", "a window closes without the write time-out";
    SkewInClosing, "skew-in-closing", "a window closes without the skew of clocks";
    SkewTwiceInClosing, "skew-twice-in-closing", "a window closes with the skew taken once";
    // A late token: Resolver (counter/core/resolve.py)
    ClockBeforeLookUp, "clock-before-look-up", "a resolver reads the clock after the look-up";
    WaitUntilClosed, "wait-until-closed", "a token is decided while its window is open";
    FirstDecisionIsFinal, "first-decision-is-final", "a resolver goes by its own decision, not by the first one";
    TombstoneOnVoid, "tombstone-on-void", "what is decided void is not hidden";
    TombstoneStays, "tombstone-stays", "what hides a void event is purged before the event's slice is dropped";
    RewriteOnApplied, "rewrite-on-applied", "what is decided applied is not written again";
    RecountForWorker, "recount-for-worker", "a resolver leaves no mark of a recount for the worker";
    RecountForReaders, "recount-for-readers", "a resolver leaves no pending recount for readers";
    RecountInOpenWindow, "recount-in-open-window", "the mark of a recount is left in the event's window";
    RecountLeftAgain, "recount-left-again", "recounts are left once, however long it took";
    DecidingMargin, "deciding-margin", "a token is decided until its slice may be dropped";
    // A cancel: Resolver with cancels (counter/core/resolve.py)
    CancelWaits, "cancel-waits", "a token is cancelled while its window is open";
    CancelClockFirst, "cancel-clock-first", "a cancel reads the clock after the look-up";
    CancelledWasApplied, "cancelled-was-applied", "a cancel of an applied token reports what it found itself";
    CancelledWasVoid, "cancelled-was-void", "a cancel of a void token reports what it found itself";
    CancelledOnce, "cancelled-once", "a cancel of a cancelled token reports what it found itself";
    CancelHides, "cancel-hides", "what is cancelled is not hidden";
    HiddenWins, "hidden-wins", "what is hidden is shown again by a resolver that read the decision before the cancel";
    CancelRecounts, "cancel-recounts", "a cancel requests no recount";
    CancelPending, "cancel-pending", "a cancel leaves no pending recount for readers";
    CancelEndedByResolver, "cancel-ended-by-resolver", "a retry of an add answers that it is cancelled without completing the cancel";
    CancelEndedByCancel, "cancel-ended-by-cancel", "a retry of a cancel answers without completing the first one";
    CancelEndedByWorker, "cancel-ended-by-worker", "a worker leaves an atomic add that is cancelled as it is";
    CancelMarked, "cancel-marked", "an atomic add is cancelled without marking it again";
    CancelMarkedAgain, "cancel-marked-again", "an atomic add that is applied or void is cancelled without marking it again";
    CancelledStays, "cancelled-stays", "the decision that a token is cancelled expires before the slice of its event is dropped";
    // The rollup: RollupWorker.roll_shard (rollup/worker.py), plan, update (rollup/roller.py)
    CountersBeforeWatermark, "counters-before-watermark", "the watermark moves before the counters are written";
    MarksUntilPassed, "marks-until-passed", "marks are dropped as soon as they are read";
    ClockBeforeMarks, "clock-before-marks", "a worker reads the clock after the marks";
    StampedByBatch, "stamped-by-batch", "counts carry the time of their writing";
    RecountFoldsRows, "recount-folds-rows", "a recount adds the difference to the checkpoint";
    RecountFoldsAllRows, "recount-folds-all-rows", "a recount folds only the windows that it summed";
    CountedWindowsAgain, "counted-windows-again", "a window that the checkpoint includes is not summed again";
    RecountMarksRead, "recount-marks-read", "a worker ignores the marks of recounts";
    PendingOnlyWhenRead, "pending-only-when-read", "a worker removes pending recounts that it did not read";
    PendingUntilPassed, "pending-until-passed", "a worker removes pending recounts of open windows";
    PendingAfterRows, "pending-after-rows", "a worker removes pending recounts together with the rows";
    DropAfterRollup, "drop-after-rollup", "a slice is dropped before the watermark has passed its events";
    DropAfterRetention, "drop-after-retention", "a slice is dropped as soon as it is rolled up";
    // Slices: Maintenance._drop_slices (rollup/maintenance.py), read_partitions (counter/core/read.py)
    DroppedBeforeFirst, "dropped-before-first", "the table of a slice is dropped before dropped_before has passed it";
    SliceMissing, "slice-missing", "a table that was dropped reads as one without events";
    DroppedWindowsLeft, "dropped-windows-left", "a window is summed again although its slice was dropped, or it is settled";
    SettledRowsLeft, "settled-rows-left", "a worker folds rows that are settled already";
    HeadReadAgain, "head-read-again", "the head is not read again after the rows";
    // A clear: fold_events, apply_fold, fold_rows (counter/windows.py)
    ClearNotLater, "clear-not-later", "a clear leaves what has its own time";
    ClearInRow, "clear-in-row", "a row does not say that its window has a clear";
    ClearInTail, "clear-in-tail", "a live tail does not say that it has a clear";
    RowsInOrder, "rows-in-order", "rows that were summed again are folded after the others";
    // A read: CountReader (counter/core/read.py)
    WatermarkBeforeHead, "watermark-before-head", "a reader reads the checkpoint before the watermark";
    ReaderRecounts, "reader-recounts", "a reader ignores pending recounts";
    TailBeyondNow, "tail-beyond-now", "the live tail ends at the reader's now";
    RowsUpToWatermark, "rows-up-to-watermark", "a reader that recounts folds up to the checkpoint, not to the watermark";
    // An atomic add: mark_atomic, AtomicSettler (rollup/atomics.py)
    AtomicMark, "atomic-mark", "an atomic add is written without its mark";
    AtomicMarkEverywhere, "atomic-mark-everywhere", "an atomic add is marked in one of its shards only";
    AtomicMarkAgain, "atomic-mark-again", "a resolver decides an atomic add without marking it again";
    AtomicMarkByWorker, "atomic-mark-by-worker", "a worker decides an atomic add without marking it again";
    AtomicMarkLeftAgain, "atomic-mark-left-again", "a resolver does not look whether its mark of an atomic add was passed before the decision";
    DecidedMark, "decided-mark", "a worker that finds a decision about an atomic add leaves no mark";
    DecidedMarkInTime, "decided-mark-in-time", "a mark names a decision before the clock is checked, so the one beside it may have been passed";
    DecidedMarkTwice, "decided-mark-twice", "a worker that finds a decision leaves one mark, which names the decision";
    DecidedMarkNames, "decided-mark-names", "a worker that finds a mark of an earlier decision leaves no mark of the cancel";
    DecidedMarkEnds, "decided-mark-ends", "a worker that finds a mark of the decision leaves another one";
    AdoptedCompared, "adopted-compared", "a worker compares its mark with the decision that it looked up, not with the one that it adopts";
    HalvesSettled, "halves-settled", "an atomic add of which some items are found is left as it is";
    NothingFoundSettled, "nothing-found-settled", "an atomic add of which nothing is found is left undecided";
    DecisionLookedUp, "decision-looked-up", "a worker leaves a complete atomic add alone although it is decided";
    SettledBeforeSummed, "settled-before-summed", "a worker sums a window although an atomic add in it is not settled";
    // Arbitrary keys: _with_token (counter/core/service.py), reserve (decisions.py)
    KeyCompared, "key-compared", "the time of a key is written without comparing what it was";
    KeyAdopted, "key-adopted", "a request goes by its own time although its key has another";
    KeyUntilVoid, "key-until-void", "a key gets a new time as soon as its old one is late";
    OldTimeCompared, "old-time-compared", "the time of a key is replaced although another request has replaced it already";
    KeyClockChecked, "key-clock-checked", "the time of a key is of a clock that is off by more than the bound";
    KeyAfterStep, "key-after-step", "a key is forgotten earlier by as much as the clock was set ahead";
    // Deletes and names: CounterService._delete, BatchRoller._undone, CassandraRollups
    DeleteSearches, "delete-searches", "a delete leaves its note although an event followed it";
    DeleteNoted, "delete-noted", "a delete leaves no note";
    NoteFirst, "note-first", "a name is taken off the list before the note is left";
    DeleteRecounts, "delete-recounts", "a delete does not ask for a recount";
    RecountAfterNote, "recount-after-note", "a delete asks for a recount before it leaves its note";
    UnlistedLast, "unlisted-last", "a name is taken off the list before the recount is asked for";
    ListedAtWindow, "listed-at-window", "a name is listed at the time of its writing";
    UnlistedAtDelete, "unlisted-at-delete", "a name is taken off the list at the time of its writing";
    UndoneWhenLater, "undone-when-later", "a worker removes a note although no later event exists";
    ListedBeforeRemoved, "listed-before-removed", "a worker removes a note before it lists the name again";
    ListedAfterDelete, "listed-after-delete", "a worker lists a name again at the time of its delete";
    // A changed accept limit: Namespaces.update (counter/core/namespaces.py), Namespace.announced (counter/types.py)
    EraAnnounced, "era-announced", "an accept limit is changed without an announcement";
    AnnouncedInTime, "announced-in-time", "an accept limit is changed however late its announcement landed";
    EraCopies, "era-copies", "an era begins while copies of the directory from before its announcement are in use";
    AcceptedByShorter, "accepted-by-shorter", "adds are accepted by the old limit until it is changed";
    ClosedByLonger, "closed-by-longer", "windows close by the old limit until it is changed";
    WrittenByFreshCopy, "written-by-fresh-copy", "an event is written by a copy of the directory of any age";
    ClosedByFreshCopy, "closed-by-fresh-copy", "a worker closes windows by a copy of the directory of any age";
    DecidedByFreshCopy, "decided-by-fresh-copy", "a token is decided by a copy of the directory of any age";
    // Namespaces of one name: CassandraControl.create_namespace, CassandraPurge.purge, Namespaces.current
    NameSettles, "name-settles", "the name of a deleted namespace is free at once";
    SettlesFromSight, "settles-from-sight", "the name of a deleted namespace is free some time after its deletion was sent, not after it was seen";
    WatermarksGone, "watermarks-gone", "a name is free while the watermarks of its deleted namespace are there";
    WatermarksFirst, "watermarks-first", "a namespace is created before its watermarks are written";
    NumbersTaken, "numbers-taken", "a namespace gets the number of the deleted one";
    NameReplaced, "name-replaced", "the row of a deleted namespace is removed before the name is created again";
    NameKept, "name-kept", "the row of a deleted namespace is removed as soon as its name is free";
    RefusedLater, "refused-later", "a creation that found the name in use takes its watermarks away at once";
    NamespaceLookedUpAgain, "namespace-looked-up-again", "an add does not look its namespace up again after its mark";
    // Slices that are made late: Maintenance (rollup/maintenance.py), CassandraSlices
    OpenSlicesFirst, "open-slices-first", "a slice that may have an open window is made after later ones";
    MarkNeedsSlice, "mark-needs-slice", "a mark is left although its slice does not exist";
    MadeInTime, "made-in-time", "a table is made however long ago its slice was found missing";
    NotMadeAgain, "not-made-again", "a slice that was dropped is made again";
    NamespacesAfterClock, "namespaces-after-clock", "a slice is dropped by a copy of the directory of any age";
    // The cache of counts: CountReader (counter/core/read.py), BatchRoller._tell_cache, Cache.put_many
    CachedAsOf, "cached-as-of", "a count out of the cache is reported as of the watermark";
    CacheNotAccurate, "cache-not-accurate", "an accurate read takes a count out of the cache";
    TailNotCached, "tail-not-cached", "a count is put into the cache with its live tail";
    PutAsOfBatch, "put-as-of-batch", "a worker puts a count into the cache as of the end of the next window";
    NewestCached, "newest-cached", "an older count replaces a newer one in the cache";
    CachedByNumber, "cached-by-number", "counts are cached by the name of their namespace, not by its number";
    // PostgreSQL: late, append (functions.sql), pass_fence, wait_for_appends (fence.py), decide (decisions.py)
    LockBeforeClock, "lock-before-clock", "an append reads the clock before it takes the lock";
    LockUntilCommit, "lock-until-commit", "an append lets go of its lock before it commits";
    FenceWaits, "fence-waits", "a worker does not wait for appends that hold the lock";
    FenceMoves, "fence-moves", "a worker closes windows without writing the clock to the fence row";
    FenceInAppend, "fence-in-append", "an append goes by the server's clock alone";
    OpenFirst, "open-first", "a decision is noted only when it is settled";
    OpenRefused, "open-refused", "an append goes on although a decision about its token is open";
    DecisionWaits, "decision-waits", "a resolver does not wait for appends under way";
    LookAgain, "look-again", "a resolver goes by what it found before the decision was open";
    CancelAppendsEnd, "cancel-appends-end", "a cancel does not wait for appends under way";
    OpenCancelEnded, "open-cancel-ended", "a resolver that meets an open cancel settles it as its own decision";
    CancelledRefused, "cancelled-refused", "an append goes on although its token is cancelled";
    CancelLocks, "cancel-locks", "a cancel reads the clock of its recount without the lock of appends";
    CancelRecountsInPlace, "cancel-recounts-in-place", "a cancel removes the event without a recount";
    // Bounds of adds: counter/storage/sqlite/bounds.py, append and refusals (functions.sql)
    BoundIdentityFirst, "bound-identity-first", "the bound is looked at before the identity of an add";
    BoundRefusalWritten, "bound-refusal-written", "a refusal is answered and not written";
    BoundRepeatedOnce, "bound-repeated-once", "two attempts in one transaction are both decided";
    BoundEventsBefore, "bound-events-before", "the events before an add in its transaction do not count";
    BoundRemovalsBefore, "bound-removals-before", "a cancel before an add in its transaction does not count";
    BoundClearRead, "bound-clear-read", "after a clear in the transaction the live tail is taken";
    BoundLogHasThem, "bound-log-has-them", "the events before an add count twice if the log is read";
    BoundUndoneUncounted, "bound-undone-uncounted", "an add that is rolled back within its transaction counts for the next one";
    BoundTailForgotten, "bound-tail-forgotten", "a commit that reports an error leaves the live tail as it is";
    BoundPendingCounts, "bound-pending-counts", "pending recounts are left out of the count";
    BoundTowardsAllowed, "bound-towards-allowed", "an add towards a bound is refused as long as the count is past it";
    BoundErasedAllowed, "bound-erased-allowed", "an add that a later clear has erased is decided as if it counted";
    BoundRefusalFound, "bound-refusal-found", "a resolver looks for events that count alone";
    BoundRefusalAdopted, "bound-refusal-adopted", "a resolver takes a refusal for an accepted add";
    BoundRefusalUncounted, "bound-refusal-uncounted", "a cancel of a refusal says that it was counted";
    BoundAppliedLooked, "bound-applied-looked", "a resolver that finds the decision applied takes it for an accepted add, though a refusal is stored";
    BoundTermsCompared, "bound-terms-compared", "the payload of a refusal is what it counts, not what was asked for";
    BoundCancelByEvent, "bound-cancel-by-event", "a cancel goes by the decision applied, though what is stored is a refusal";
    BoundCancelGivesRoom, "bound-cancel-gives-room", "a cancelled add keeps its room";
    BoundOfNamespaceApart, "bound-of-namespace-apart", "the namespace's bound is part of the payload";
    BoundAwaitsAppends, "bound-awaits-appends", "a namespace's bound is in force while appends without it are under way";
    BoundAtomicWhole, "bound-atomic-whole", "of an atomic add, only the item past its bound is refused";
    BoundAllLocks, "bound-all-locks", "an atomic add locks one of its counters";
    BoundLocksInOrder, "bound-locks-in-order", "locks are taken in any order";
    BoundCountAfterLock, "bound-count-after-lock", "the count is read before the lock";
    BoundLockUntilCommit, "bound-lock-until-commit", "the lock is released before the standby has the commit";
    BoundOneStatement, "bound-one-statement", "checkpoint and tail are read by two statements";
    BoundStoredAnswers, "bound-stored-answers", "an add answers what it decided, though another attempt was stored";
    BoundRefusalWaits, "bound-refusal-waits", "a refusal is answered before the standby has it";
    BoundReplayWaits, "bound-replay-waits", "what is found is answered before the standby has it";
    // Holds: not in the product yet (docs/architecture.md)
    HoldIdentityFirst, "hold-identity-first", "the bound is looked at before the identity of a hold";
    HoldCountsForAdds, "hold-counts-for-adds", "a bounded add does not see the open holds";
    HoldApart, "hold-apart", "what is held upwards and downwards is one sum";
    HoldErasedDecided, "hold-erased-decided", "a hold of before a clear is accepted without its bounds";
    HoldClearLeavesHeld, "hold-clear-leaves-held", "a clear erases what is held";
    HoldExpiredGivesRoom, "hold-expired-gives-room", "an add that has no room does not look for expired holds";
    HoldExpiryByAdds, "hold-expiry-by-adds", "an add takes the room of an expired hold without ending it";
    HoldExpiryWritten, "hold-expiry-written", "a settle or a release that finds its hold expired does not end it";
    HoldRetrySaysEnd, "hold-retry-says-end", "a retry of a hold does not say that it has ended";
    HoldEndLooked, "hold-end-looked", "an end does not look for another one";
    HoldEndOneNonce, "hold-end-one-nonce", "settle, release and expiry have a nonce each";
    HoldRefusedNotEnded, "hold-refused-not-ended", "a refused hold is settled as an open one";
    HoldAbsentNotFinal, "hold-absent-not-final", "that there is no such hold is a definite answer";
    HoldSettleSameWay, "hold-settle-same-way", "a hold is settled with an amount of the other sign";
    HoldReservedWithEnd, "hold-reserved-with-end", "the time of an end is reserved in a transaction before";
    HoldReservationKept, "hold-reservation-kept", "the reserved time of an end is forgotten before the events of its hold are dropped";
    HoldEndInOpenWindow, "hold-end-in-open-window", "an end has the time of the clock alone, which may be in a closed window";
    HoldEndOwnTime, "hold-end-own-time", "an end has the time of its hold";
    HoldEndAfterHold, "hold-end-after-hold", "an end may have a time of before its hold";
    HoldExtensionShortens, "hold-extension-shortens", "an extension sets an earlier time";
    HoldExtensionRevives, "hold-extension-revives", "an extension does not look whether its hold has ended";
    HoldCancelReleases, "hold-cancel-releases", "a cancel removes the events of a hold, as those of an add";
    HoldCancelOfReleased, "hold-cancel-of-released", "a cancel of a hold that is released is refused";
    HoldWorkerLooksAgain, "hold-worker-looks-again", "a worker ends what it found expired before it had the lock";
    HoldCountAfterLock, "hold-count-after-lock", "the count and what is held are read before the lock";
    HoldEndLocks, "hold-end-locks", "a settle and a release take no lock";
    HoldCancelLocks, "hold-cancel-locks", "a cancel of a hold's token takes no lock";
    HoldDecisionsAfterLock, "hold-decisions-after-lock", "a hold looks for decisions before it has the lock";
    HoldLockUntilCommit, "hold-lock-until-commit", "the lock is released before the standby has the commit";
    HoldEndLocksAppends, "hold-end-locks-appends", "an end reads its clock without the lock of appends";
    HoldLoserWaits, "hold-loser-waits", "what a loser or a retry finds is answered before the standby has it";
    HoldExtensionWaits, "hold-extension-waits", "an extension that changes nothing is answered before the standby has what it found";
}

impl Rule {
    /// The smallest scenario that shows what the rule is for.
    pub fn scenario(self) -> &'static str {
        use Rule::*;
        match self {
            SkewInClosing | SkewTwiceInClosing | ClockGuard => "skewed clocks",
            FirstDecisionIsFinal => "three requests",
            TailBeyondNow => "slow reader",
            WatermarkBeforeHead => "reader",
            DropAfterRollup | DropAfterRetention | DecidingMargin => "retention",
            StampedByBatch => "rivals",
            RecountFoldsAllRows | RowsUpToWatermark => "two tokens",
            AtomicMark | AtomicMarkAgain | AtomicMarkLeftAgain | HalvesSettled | NothingFoundSettled
            | DecisionLookedUp | RewriteOnApplied => "atomic",
            AtomicMarkByWorker | DecidedMarkEnds => "atomic, two workers",
            DecidedMark => "atomic, void late",
            DecidedMarkInTime | DecidedMarkTwice => "atomic, adopted late",
            DecidedMarkNames | AdoptedCompared => "cancel, atomic, late",
            AtomicMarkEverywhere => "atomic, two shards",
            SettledBeforeSummed => "atomic, skewed",
            CancelWaits
            | CancelClockFirst
            | CancelledWasApplied
            | CancelledWasVoid
            | CancelHides
            | HiddenWins
            | CancelRecounts
            | CancelPending
            | CancelEndedByResolver
            | CancelledStays => "cancel",
            CancelledOnce | CancelEndedByCancel => "cancel, retried",
            CancelEndedByWorker | CancelMarked => "cancel, atomic",
            CancelMarkedAgain => "cancel, atomic, longer",
            KeyClockChecked => "keys",
            KeyCompared | KeyAdopted | KeyUntilVoid | OldTimeCompared => "keys, three requests",
            KeyAfterStep => "keys, clock set",
            DroppedBeforeFirst | SliceMissing | DroppedWindowsLeft | SettledRowsLeft => "two slices",
            HeadReadAgain => "two slices, reader",
            ClearNotLater => "clear at once",
            ClearInRow | ClearInTail => "clear",
            RowsInOrder | PendingAfterRows => "late add and clear",
            DeleteSearches | DeleteNoted | NoteFirst | DeleteRecounts | RecountAfterNote | UnlistedLast
            | UndoneWhenLater | ListedAtWindow | ListedBeforeRemoved | ListedAfterDelete => "names",
            UnlistedAtDelete => "names, next window",
            EraAnnounced | AnnouncedInTime | ClosedByLonger | ClosedByFreshCopy | DecidedByFreshCopy => {
                "eras, longer"
            }
            EraCopies | AcceptedByShorter | WrittenByFreshCopy => "eras, shorter",
            NameSettles
            | SettlesFromSight
            | WatermarksGone
            | WatermarksFirst
            | NumbersTaken
            | NamespaceLookedUpAgain => "generations",
            NameReplaced | NameKept | RefusedLater => "generations, late create",
            OpenSlicesFirst | MarkNeedsSlice | MadeInTime | NotMadeAgain | NamespacesAfterClock => {
                "late slice"
            }
            CachedAsOf | CacheNotAccurate | TailNotCached | PutAsOfBatch | NewestCached | CachedByNumber => {
                "cache"
            }
            LockBeforeClock | LockUntilCommit | FenceWaits | FenceMoves | FenceInAppend | OpenFirst
            | OpenRefused | DecisionWaits | LookAgain => "fence",
            CancelAppendsEnd | CancelledRefused | OpenCancelEnded | CancelLocks | CancelRecountsInPlace => {
                "fence, cancel"
            }
            BoundIdentityFirst | BoundRefusalWritten | BoundRepeatedOnce | BoundEventsBefore
            | BoundTermsCompared | BoundLogHasThem | BoundUndoneUncounted | BoundTailForgotten
            | BoundRefusalFound | BoundRefusalAdopted => "bounds, SQLite",
            BoundRefusalUncounted | BoundCancelGivesRoom => "bounds, SQLite, cancel",
            BoundRemovalsBefore | BoundPendingCounts | BoundTowardsAllowed => "bounds, SQLite, down",
            BoundClearRead | BoundErasedAllowed => "bounds, SQLite, clear",
            BoundOfNamespaceApart => "bounds, SQLite, namespace",
            BoundCountAfterLock | BoundLockUntilCommit | BoundRefusalWaits | BoundReplayWaits => {
                "bounds, PostgreSQL"
            }
            BoundCancelByEvent | BoundAppliedLooked => "bounds, PostgreSQL, cancel",
            BoundOneStatement => "bounds, PostgreSQL, down",
            BoundAwaitsAppends | BoundStoredAnswers => "bounds, PostgreSQL, namespace",
            BoundAtomicWhole | BoundAllLocks | BoundLocksInOrder => "bounds, PostgreSQL, atomic",
            HoldExtensionShortens | HoldExtensionRevives => "holds, SQLite, extended",
            HoldCancelReleases | HoldCancelOfReleased => "holds, SQLite, cancel",
            HoldEndAfterHold => "holds, SQLite, two",
            HoldApart | HoldSettleSameWay => "holds, SQLite, down",
            HoldErasedDecided | HoldClearLeavesHeld => "holds, SQLite, clear",
            HoldCountAfterLock | HoldEndLocks | HoldLockUntilCommit | HoldEndLocksAppends => {
                "holds, PostgreSQL"
            }
            HoldCancelLocks | HoldDecisionsAfterLock => "holds, PostgreSQL, cancel",
            HoldWorkerLooksAgain => "holds, PostgreSQL, extended",
            HoldLoserWaits => "holds, PostgreSQL, failover",
            HoldExtensionWaits => "holds, PostgreSQL, failover, extended",
            HoldIdentityFirst | HoldCountsForAdds | HoldExpiredGivesRoom | HoldExpiryByAdds
            | HoldExpiryWritten | HoldRetrySaysEnd | HoldEndLooked | HoldEndOneNonce
            | HoldRefusedNotEnded | HoldAbsentNotFinal | HoldReservedWithEnd | HoldReservationKept
            | HoldEndInOpenWindow | HoldEndOwnTime => "holds, SQLite",
            _ => "one token",
        }
    }

    /// Why breaking the rule breaks nothing, if so.
    pub fn harmless(self) -> Option<&'static str> {
        match self {
            Rule::DecidingMargin => Some(
                "the watermark must pass the end of retention before the drop, so it passes every recount left until then",
            ),
            Rule::RecountMarksRead => Some(
                "a resolution leaves a pending recount as well, which the worker reads with the head: only what a client asks for is lost, and no promise is about that",
            ),
            Rule::OpenCancelEnded => Some(
                "the cancel replaces what the resolver settled, or it died and was not answered: a retry of it must begin again",
            ),
            Rule::NewestCached => Some(
                "each count says what it is as of, and a reader that needs a newer one reads the store: it costs reads, no promise",
            ),
            _ => None,
        }
    }

    pub fn by_name(name: &str) -> Option<Rule> {
        ALL.iter().copied().find(|rule| rule.name() == name)
    }
}
