"""What a step's result changes: pages are known, tokens go out, requests end."""

from collections.abc import Sequence as Tokens

from edgemesh.decide.request import Event, Sequence, State
from edgemesh.decide.scoring import take
from edgemesh.decide.state import GroupState
from edgemesh.decide.steps import Run, Step
from edgemesh.wire.ids import Finish
from edgemesh.wire.messages import Done, Logprob

NO_TOKEN = -1
"""A draw that no rank accepted: the row draws again, at the same position, in its next step."""


class ResultError(RuntimeError):
    """A result that does not fit the plan it answers."""


def apply(state: GroupState, step: Step, done: Done) -> None:
    """Take a real step's result; what belongs to an earlier life of a request is dropped."""
    finals = [run for run in step.chunks if run.final]
    rows = sorted(step.rows, key=lambda run: run.slot)
    if len(done.firsts) != len(finals) or len(done.slots) != len(rows) or len(done.tokens) != len(rows):
        message = (
            f"{done.plane} tick {done.tick}: {len(done.firsts)} first tokens and {len(done.tokens)} row tokens, "
            f"where {len(finals)} and {len(rows)} were planned"
        )
        raise ResultError(message)
    undrawn = {run.sequence for run, token in zip(finals, done.firsts, strict=True) if token == NO_TOKEN}
    for run in step.chunks:
        # A draw that failed computes its last position again, so that one must not be known to others yet.
        _written(state, run, run.upto - 1 if run.final and run.sequence in undrawn else run.upto)
    take(state, step.chunks, done)
    for run in step.chunks:
        if run.life == run.sequence.life and run.sequence.prompt_only and run.upto == run.sequence.target:
            _computed(state, run.sequence, done.tick)
    for run, token, logprob in zip(finals, done.firsts, _padded(done.first_logprobs, len(finals)), strict=True):
        if run.life == run.sequence.life:
            _first(state, run.sequence, token, logprob, done.tick)
    for run, slot, token, logprob in zip(rows, done.slots, done.tokens, _padded(done.logprobs, len(rows)), strict=True):
        if slot != run.slot:
            message = f"{done.plane} tick {done.tick}: a token of slot {slot}, where slot {run.slot} was planned"
            raise ResultError(message)
        if run.life == run.sequence.life:
            _row(state, run.sequence, token, logprob)


def _padded(logprobs: Tokens[Logprob | None], length: int) -> Tokens[Logprob | None]:
    return logprobs if len(logprobs) == length else (None,) * length


def _written(state: GroupState, run: Run, upto: int) -> None:
    """A chunk's KV is in its pages: from now on others may find them by their tokens."""
    sequence = run.sequence
    if run.life != sequence.life:
        return
    sequence.written = max(sequence.written, upto)
    state.prefix.insert(sequence.cursor, sequence.tokens, sequence.pages, sequence.written)


def _computed(state: GroupState, sequence: Sequence, tick: int) -> None:
    """A prompt that was asked for alone."""
    state.effects.note("request.prefilled", request=sequence.submit.request, tick=tick)
    state.emit(sequence, sequence.out, (), Finish.LENGTH)
    finish(state, sequence, Finish.LENGTH)


def _first(state: GroupState, sequence: Sequence, token: int, logprob: Logprob | None, tick: int) -> None:
    """The token after the prompt."""
    if token == NO_TOKEN:
        sequence.planned = sequence.target - 1
        return
    sequence.move(Event.PREFILLED)
    del state.prefilling[sequence]
    state.ready[sequence] = None
    state.effects.note("request.prefilled", request=sequence.submit.request, tick=tick)
    _accept(state, sequence, token, logprob)


def _row(state: GroupState, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
    """The next token of a row, or a row that left and must join once more for its last draw."""
    sequence.flying -= 1
    if token != NO_TOKEN:
        sequence.written = len(sequence.tokens)
        _accept(state, sequence, token, logprob)
    if sequence.state is State.DECODE and sequence.slot < 0 and not sequence.flying:
        sequence.move(Event.LEFT)
        state.ready[sequence] = None


def _accept(state: GroupState, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
    index = sequence.out
    if _stops(state, sequence, token):
        state.emit(sequence, index, (), Finish.STOP, stop_token=token)
        finish(state, sequence, Finish.STOP)
        return
    sequence.tokens.append(token)
    ended = sequence.left <= 0
    state.emit(sequence, index, (token,), Finish.LENGTH if ended else Finish.NONE, logprob)
    if ended:
        finish(state, sequence, Finish.LENGTH)
    elif sequence.grammar is not None:
        state.ask(sequence, sequence.grammar, (token,))


def _stops(state: GroupState, sequence: Sequence, token: int) -> bool:
    """Whether the token is the end: a stop token once there are enough others, or the end of a grammar that allows no other."""
    if token in sequence.stops and sequence.out >= sequence.submit.sampling.min_tokens:
        return True
    return sequence.grammar is not None and token in state.config.eos_token_ids


def finish(state: GroupState, sequence: Sequence, reason: Finish) -> None:
    """End a request whose last words are said."""
    out = sequence.out
    state.end(sequence)
    state.effects.note("request.finished", request=sequence.submit.request, finish=reason.value, output_tokens=out)
