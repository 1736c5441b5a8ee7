"""What can go wrong between ranks; without torch, so that whoever only tells others about it needs none."""

from collections.abc import Sequence


class CollectiveError(RuntimeError):
    """A collective did not complete; the epoch is over for this rank."""


class CollectiveTimeoutError(CollectiveError):
    """Ranks (by their index in the group) that did not come to a collective of ``group`` before its deadline."""

    def __init__(self, group: str, missing: Sequence[int]) -> None:
        self.group = group
        self.missing = tuple(missing)
        super().__init__(f"collective of group {group!r}: rank(s) {list(missing)} of the group did not come in time")
