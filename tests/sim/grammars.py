"""Grammars that are nothing but a function of their source and of what was said: for the oracle, and for groups that ask."""

from dataclasses import dataclass
from random import Random

from kvshadow import VOCAB

from edgemesh.decide.asks import Answer

EOS = VOCAB - 1
MS = 1_000_000


@dataclass(frozen=True)
class Rule:
    """What may follow: some ids (the end among them now and then), nothing but the end after ``longest``, or an error."""

    source: str

    @property
    def longest(self):
        return Random(self.source).randrange(1, 30)

    def allowed(self, out):
        """Ids that may follow, empty where only the end may. Raises ``ValueError`` for a source that is none."""
        if self.source.startswith("bad"):
            raise ValueError("this source is none")
        if len(out) >= self.longest:
            return frozenset()
        random = Random(f"{self.source}:{list(out)}")
        return frozenset(random.sample(range(VOCAB), random.choice([1, 2, 20, VOCAB])))


def mask_of(allowed):
    bits = sum(1 << each for each in allowed)
    return bits.to_bytes(-(-VOCAB // 32) * 4, "little")


def drawable(submit, out):
    """What of a request's grammar may be drawn: the end only as its client wants it; None where there is no grammar."""
    if not submit.grammar:
        return None
    allowed = Rule(submit.grammar).allowed(out)
    if EOS not in submit.sampling.stop_token_ids:
        return allowed - {EOS} or allowed
    return allowed


class SimDesk:
    """Answers a group's questions late, out of order, and holds them to the rules: every token once, none after the end."""

    def __init__(self, sim, name):
        self.sim, self.name = sim, name
        self.said, self.ready, self.over = {}, [], set()

    def take(self, asks, dropped):
        for ask in asks:
            sequence, sim = ask.sequence, self.sim
            name = sequence.submit.request
            sim.expect(sequence not in self.over, f"{name}: a question after its end")
            said = self.said.setdefault(sequence, [])
            said.extend(ask.tokens)
            asked = list(said)
            sim.later(self.sim.world.grammar_ms * MS, lambda s=sequence, a=asked: self.work_out(s, a))
        self.over.update(dropped)
        for sequence in dropped:
            self.said.pop(sequence, None)

    def work_out(self, sequence, said):
        try:
            allowed = Rule(sequence.submit.grammar).allowed(said)
            answer = Answer(sequence, mask_of(allowed) if allowed else b"", not allowed, compile_ns=5, mask_ns=7)
        except ValueError as error:
            answer = Answer(sequence, error=str(error))
        if sequence not in self.over:
            out = list(sequence.tokens[sequence.prompt_tokens :])
            self.sim.expect(said == out, f"{sequence.submit.request}: asked after {said}, but it has said {out}")
        self.ready.append(answer)
        self.sim.wake(self.name)

    def answers(self):
        ready, self.ready = self.ready, []
        return ready

    def deadline(self):
        return None
