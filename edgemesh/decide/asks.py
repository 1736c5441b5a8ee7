"""Questions about grammars, and their answers.

The work (compiling, taking a token, masking) takes from microseconds to seconds, so a group never waits for it: it asks, plans
steps for everyone else, and takes the answer when it comes. There is at most one question about a request at a time.
"""

from dataclasses import dataclass

from edgemesh.decide.request import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What may follow ``tokens``, the newest of the request's output? The first question about a request begins its grammar."""

    sequence: Sequence
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """``mask`` as in ``Constraint``; ``ended`` says that only the end may follow.

    An ``error`` says why there is neither: with ``status`` 400 the request's grammar is to blame, with 500 a token that was drawn
    against its mask.
    """

    sequence: Sequence
    mask: bytes = b""
    ended: bool = False
    error: str = ""
    status: int = 400
    compile_ns: int = 0
    mask_ns: int = 0
