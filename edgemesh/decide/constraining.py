"""Requests whose output a grammar restricts: what an answer about one changes, and what none in time does."""

from edgemesh.decide.asks import Answer
from edgemesh.decide.grammar import Constraint, bits, narrowed
from edgemesh.decide.request import Sequence
from edgemesh.decide.results import finish
from edgemesh.decide.state import GroupState
from edgemesh.wire.ids import Finish


def constrain(state: GroupState, sequence: Sequence) -> None:
    """A new request has a grammar: its first mask is wanted, after the tokens that its client has already."""
    sampling = sequence.submit.sampling
    ignored = [each for each in state.config.eos_token_ids if each not in sequence.stops]
    sequence.grammar = Constraint(bits(sampling.allowed_token_ids), bits(ignored))
    state.ask(sequence, sequence.grammar, tuple(sequence.submit.emitted))


def answer(state: GroupState, found: Answer, now_ns: int) -> None:
    """Take an answer; that about a request which has ended meanwhile changes nothing."""
    sequence, grammar = found.sequence, found.sequence.grammar
    if grammar is None or sequence not in state.asking:
        return
    del state.asking[sequence]
    _count(state, sequence, grammar, found, now_ns)
    if found.error:
        code = "invalid_grammar" if found.status < 500 else "grammar_violated"
        state.fail(sequence, found.status, code, found.error)
        return
    if found.ended:
        state.emit(sequence, sequence.out, (), Finish.STOP)
        finish(state, sequence, Finish.STOP)
        return
    grammar.mask = narrowed(found.mask, grammar.only, grammar.less)
    if not grammar.mask.strip(b"\0"):
        reason = (
            f"after {sequence.out} tokens of output the grammar allows none of the "
            f"{len(sequence.submit.sampling.allowed_token_ids)} ids in `allowed_token_ids`"
        )
        state.fail(sequence, 400, "invalid_grammar", reason)


def _count(state: GroupState, sequence: Sequence, grammar: Constraint, found: Answer, now_ns: int) -> None:
    waited_ns = now_ns - grammar.asked_ns
    if not grammar.masks:
        state.effects.note(
            "request.grammar",
            request=sequence.submit.request,
            characters=len(sequence.submit.grammar),
            compile_ns=found.compile_ns,
            waited_ns=waited_ns,
        )
    grammar.mask_ns += found.mask_ns
    grammar.waited_ns += waited_ns
    grammar.masks += 1


def expire(state: GroupState, now_ns: int) -> None:
    """A grammar that takes too long to work out ends its own request."""
    for sequence, asked_ns in list(state.asking.items()):
        if now_ns - asked_ns < state.config.grammar_ns:
            return
        reason = (
            f"what may follow the {sequence.out} tokens of output took longer than {state.config.grammar_ns / 1e9:g} s "
            "to work out; use a simpler grammar"
        )
        state.fail(sequence, 400, "invalid_grammar", reason)


def due(state: GroupState) -> int | None:
    """When the oldest question must have been answered."""
    oldest = next(iter(state.asking.values()), None)
    return None if oldest is None else oldest + state.config.grammar_ns
