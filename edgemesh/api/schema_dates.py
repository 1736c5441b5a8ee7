"""Dates and times as the formats of JSON Schema have them (RFC 3339), as patterns that match every valid one and no other.

Leap seconds are left out: hardly any reader of dates takes them.
"""

from __future__ import annotations

from typing import Final

_YEAR: Final = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR: Final = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"

PATTERNS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
