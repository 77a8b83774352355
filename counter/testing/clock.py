"""Time in the test's hand."""


class FakeClock:
    """A clock that does not move until it is advanced; its boot was long before *start_us*."""

    def __init__(self, start_us: int) -> None:
        self._now_us = start_us
        self._boottime_us = 1_000_000_000

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return self._now_us

    def forget_after(self, time_us: int) -> None:
        """It holds no latest reading."""

    def boottime_us(self) -> int:
        return self._boottime_us

    def advance(self, us: int) -> None:
        """Let *us* microseconds pass on both clocks."""
        self._now_us += us
        self._boottime_us += us
