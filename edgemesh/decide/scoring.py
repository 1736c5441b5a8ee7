"""Log-probabilities of prompts: which positions a chunk is asked for, and what their coming changes.

Each position is computed once more or less for its KV, but its log-probabilities reach the gateway exactly once: what was sent on stays
sent when a request is preempted, and what was under way then is asked for again.
"""

from typing import Final

from edgemesh.decide.request import Sequence
from edgemesh.decide.state import GroupState
from edgemesh.decide.steps import Run
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Done, PromptLogprobs, Scoring

MAX_SCORED: Final = 1024
"""Positions that one step scores: each costs a row of logits, and with all its alternatives 168 bytes of the step's result."""


class ScoresError(RuntimeError):
    """Log-probabilities that do not fit the plan they answer."""


def reach(sequence: Sequence) -> int | None:
    """How many tokens a cached prefix may cover: no position that must still be scored (None: any number)."""
    return sequence.scored if sequence.scored < sequence.to_score else None


def cut(sequence: Sequence, upto: int, left: int) -> int:
    """Where a chunk that would go to ``upto`` must end, if the step may score ``left`` more positions."""
    first = max(sequence.planned, sequence.scored)
    return min(upto, first + left) if min(upto, sequence.to_score) - first > left else upto


def scoring(sequence: Sequence, upto: int) -> Scoring | None:
    """What the chunk from the first position not planned yet is asked for."""
    first, end = max(sequence.planned, sequence.scored), min(upto, sequence.to_score)
    if first >= end:
        return None
    targets = TokenArray(sequence.tokens[first + 1 : end + 1])
    return Scoring(first, sequence.submit.prompt_logprobs, targets)


def take(state: GroupState, runs: list[Run], done: Done) -> None:
    """Pass a step's log-probabilities on; those of an earlier life are dropped, and will be asked for again."""
    asked = [(run, run.scoring) for run in runs if run.scoring is not None]
    if len(done.prompt_logprobs) != len(asked):
        message = (
            f"{done.plane} tick {done.tick}: {len(done.prompt_logprobs)} scored chunks, where {len(asked)} were asked"
        )
        raise ScoresError(message)
    for (run, wanted), found in zip(asked, done.prompt_logprobs, strict=True):
        if (found.start, found.count) != (wanted.first, len(wanted.targets)):
            message = (
                f"{done.plane} tick {done.tick}: {found.count} positions from {found.start} are scored, "
                f"where {len(wanted.targets)} from {wanted.first} were asked"
            )
            raise ScoresError(message)
        if run.life == run.sequence.life:
            _send(state, run.sequence, found)


def _send(state: GroupState, sequence: Sequence, found: PromptLogprobs) -> None:
    sequence.scored = found.start + found.count
    state.emit_scores(sequence, found)
