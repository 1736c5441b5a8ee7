"""The words every message is made of: planes, roles, and bounded numbers.

A bound here is a bound everywhere: the decoder of each inbox refuses what lies outside it, so no
actor has to check a number that came off a socket a second time.
"""

import enum
from typing import Annotated, Final

from msgspec import Meta

MAX_RANKS: Final = 64
"""Ranks per plane that one mesh may have; a bound for ids, not a promise about speed."""

MAX_TOKENS: Final = 1 << 20
"""Tokens that one prompt or one step may hold."""

MAX_PAGES: Final = 1 << 24
"""Pages that one group's slab may have."""


MAX_ALTERNATIVES: Final = 20
"""Likeliest tokens that may be asked for beside one token."""

MAX_TEXT: Final = 4096
"""Characters of a reason; who sends on what others said cuts it, or nobody would hear it."""


class Word(enum.StrEnum):
    """A word of the wire. It hashes as the string it is: several times as fast as an enum's own hash, on every look-up."""

    __hash__ = str.__hash__


class Plane(Word):
    """A stream of steps with its own ticks, barrier and process groups."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Role(Word):
    """What an actor is; its name is the role and its index (``group-0``, ``rank-3.decode``)."""

    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"
    ROUTER = "router"
    GROUP = "group"
    BARRIER = "barrier"
    RANK = "rank"
    VAULT = "vault"


class Layout(Word):
    """How the tokens of several groups lie in a collective of one tick."""

    EVEN = "even"
    """Every group is padded to the verdict's bucket."""

    RAGGED = "ragged"
    """Every group sends exactly the tokens that the verdict lists for it."""


class Finish(Word):
    """Why a stream ended."""

    NONE = ""
    """It has not ended."""

    STOP = "stop"
    """A stop token was drawn (it is not among the emitted tokens)."""

    LENGTH = "length"
    ABORT = "abort"


class Phase(Word):
    """What an actor is busy with, as its progress reports say it."""

    STARTING = "starting"
    LOADING = "loading"
    CONNECTING = "connecting"
    WAITING = "waiting"
    """Nothing to do: no plan, no release, no request is owed."""

    ARRIVED = "arrived"
    """A group waits for the release of a tick."""

    PLANNED = "planned"
    """A group waits for the result of a tick."""

    RUNNING = "running"
    """A rank executes a step."""

    DRAINING = "draining"
    BUSY = "busy"
    """The actor's loop has not come back to its messages since."""


NonNegative = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Nanoseconds = NonNegative
Bytes = NonNegative
GroupId = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
RankId = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
GatewayId = Annotated[int, Meta(ge=0, lt=256)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tick = NonNegative
Revision = NonNegative
Slot = Annotated[int, Meta(ge=0, lt=1 << 16)]
PageId = Annotated[int, Meta(ge=1, lt=MAX_PAGES)]
"""Page 0 is scratch and never travels: padding and idle rows use it without being told."""

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Position = TokenCount
RequestId = Annotated[str, Meta(min_length=1, max_length=160)]
ActorName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[a-z]+-\d+(\.[a-z]+)?\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
