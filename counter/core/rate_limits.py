"""Say what extra work a request may cause, by the rates of its caller."""

from __future__ import annotations

from typing import Final, Protocol


class Allowance(Protocol):
    """The extra work that a request may still cause, beyond what its size suggests."""

    def reserve(self, count: int) -> None:
        """Take reservations of arbitrary Idempotency-Keys. Raises RateLimitedError."""
        ...

    def resolve(self, count: int, *, overdraws: bool = False) -> None:
        """Take resolutions of late tokens. Raises RateLimitedError, unless it *overdraws*."""
        ...


class _Unlimited:
    """The allowance of a caller without rates."""

    def reserve(self, count: int) -> None:
        """Allow them."""

    def resolve(self, count: int, *, overdraws: bool = False) -> None:
        """Allow them."""


UNLIMITED: Final[Allowance] = _Unlimited()


class BatchAllowance:
    """The allowance of the items of a batch, which is accepted whole while a bucket is not empty.

    Reservations and the resolutions of tokens were charged before. Whether a key's token is late is
    known only after its time is read: the first such item decides for the others.
    """

    def __init__(self, request: Allowance, resolutions: int = 0) -> None:
        """*request* is the allowance of the request, which was charged for *resolutions*."""
        self._request = request
        self._paid = resolutions
        self._is_accepted = resolutions > 0

    def reserve(self, count: int) -> None:
        """Do nothing: the reservations were charged before."""

    def resolve(self, count: int, *, overdraws: bool = False) -> None:
        """See :class:`Allowance`."""
        if self._paid >= count:
            self._paid -= count
            return
        self._request.resolve(count, overdraws=overdraws or self._is_accepted)
        self._is_accepted = True
