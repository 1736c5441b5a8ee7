"""Known parameters that nothing acts on, of every body."""

from __future__ import annotations

from typing import Final

from edgemesh.api.messages import MESSAGES_NEUTRAL
from edgemesh.api.openai import NEUTRAL, Neutral
from edgemesh.api.responses import RESPONSES_NEUTRAL

EVERY_NEUTRAL: Final[dict[str, Neutral]] = NEUTRAL | RESPONSES_NEUTRAL | MESSAGES_NEUTRAL
"""By struct: the values that ask for nothing (null always does), in words too."""
