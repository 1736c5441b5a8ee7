"""The simulated ends of a mesh: ranks that hold plans to every rule, clients that compare each token, a supervisor."""

from collections import deque
from dataclasses import dataclass, field

from kvshadow import VOCAB, scores

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Finish, Layout, Phase
from edgemesh.wire.messages import (
    Accepted,
    Attached,
    Begin,
    Cancel,
    Credit,
    Done,
    Drained,
    Emit,
    Failed,
    Fault,
    IdleDone,
    IdlePlan,
    Mark,
    Plan,
    Ready,
    Rejected,
    Sampling,
    Submit,
)

MS = 1_000_000


@dataclass
class Stream:
    """A request as its client sees it."""

    submit: Submit
    at_ns: int
    abort_ns: int | None = None
    slow: bool = False
    group: int | None = None
    tokens: list = field(default_factory=list)
    scores: list = field(default_factory=list)
    scored: int = 0
    end: str = ""
    ended_ns: int = 0
    first_ns: int = 0
    reason: str = ""
    cancelled: bool = False
    credit: int = 1 << 20


def ask(name, prompt, max_tokens, *, at_ms=0.0, seed=0, gateway=0, **fields):
    """A request made by hand; those of one ``seed`` begin alike."""
    tokens = TokenArray.of((seed * 31 + each) % VOCAB for each in range(prompt))
    submit = Submit(name, 0, gateway, tokens, Sampling(), max_tokens, **fields)
    return Stream(submit, int(at_ms * MS))


class SimSupervisor:
    """Starts the others and notes what they report."""

    def __init__(self, sim, name):
        self.sim, self.name, self.done = sim, name, False
        self.ready, self.drained, self.faults = set(), set(), []

    def receive(self, _kind, message):
        if isinstance(message, Ready):
            self.ready.add(message.actor)
        if isinstance(message, Drained):
            self.drained.add(message.actor)
        if isinstance(message, Fault):
            self.faults.append(message)
        self.sim.expect(not self.faults, f"a fault: {self.faults}")

    def settle(self):
        pass

    def deadline(self):
        return None

    def marks(self):
        return ()


class SimRank:
    """Executes plans in order, in step with its coupled set; its group's leader keeps the device and answers."""

    def __init__(self, sim, name, port):
        mesh = sim.mesh
        self.sim, self.name, self.port, self.done = sim, name, port, False
        actor = mesh.actor(name)
        self.rank, self.group, self.plane = actor.index, actor.group, actor.plane
        self.leads = mesh.leader(self.group) == self.rank
        self.set = mesh.set_of(self.group)
        self.member = self.set.groups.index(self.group)
        self.last, self.queue, self.busy, self.result = -1, deque(), False, None

    def receive(self, _kind, message):
        if isinstance(message, Begin):
            attached = Attached(self.group, self.plane, message.epoch, self.rank)
            self.port.send(LinkKind.RESULT, attached, f"group-{self.group}")
        elif isinstance(message, Plan | IdlePlan):
            self.check(message)
            self.queue.append(message)

    def check(self, plan):
        sim, tick = self.sim, plan.tick
        expected = self.last + len(self.queue) + self.busy + 1
        sim.expect(tick == expected, f"{self.name} got tick {tick}, and {expected} is next")
        sim.expect(len(self.queue) + self.busy < 3, f"{self.name} is {len(self.queue) + self.busy} plans behind")
        verdict = sim.verdicts.setdefault((self.set.index, plan.plane, tick), plan.verdict)
        sim.expect(verdict == plan.verdict, f"two verdicts of {plan.plane} tick {tick}: {verdict} and {plan.verdict}")
        sim.expect(any(verdict.tokens), f"{plan.plane} tick {tick} runs though all groups are idle")
        tokens = verdict.tokens[self.member]
        sim.expect(bool(tokens) == isinstance(plan, Plan), f"{self.name}: {tokens} tokens with {type(plan).__name__}")
        if verdict.layout is Layout.EVEN:
            sim.expect(verdict.bucket >= max(verdict.tokens), f"bucket {verdict.bucket} for {verdict.tokens}")
        mine = sim.plans.setdefault((self.group, plan.plane, tick), plan)
        sim.expect(mine == plan, f"the ranks of group {self.group} got different plans for {plan.plane} tick {tick}")

    def settle(self):
        if self.busy or not self.queue:
            return
        plan = self.queue.popleft()
        self.busy = True
        if self.leads and isinstance(plan, Plan):
            device = self.sim.devices[self.group]
            self.result, count = device.begin(plan, self.sim.random, self.sim.world.retries)
            expected = plan.verdict.tokens[self.member]
            self.sim.expect(count == expected, f"{self.name} tick {plan.tick}: {count} tokens, verdict {expected}")
        self.sim.join(self, plan)

    def finish(self, plan, step_ns):
        self.last, self.busy = plan.tick, False
        if self.leads:
            head = (self.group, self.plane, plan.epoch, plan.tick)
            done = IdleDone(*head, step_ns)
            if isinstance(plan, Plan):
                self.sim.devices[self.group].end(self.plane)
                done = Done(*head, **self.result, step_ns=step_ns)
            self.port.send(LinkKind.RESULT, done, f"group-{self.group}")
        self.sim.wake(self.name)

    def deadline(self):
        return None

    def marks(self):
        return (Mark(self.plane, self.last + 1, Phase.RUNNING if self.busy else Phase.WAITING, 0, 0),)


class SimGateway:
    """Clients that ask, read, and leave; every stream is compared with the oracle as it comes."""

    def __init__(self, sim, name, port):
        self.sim, self.name, self.port, self.done = sim, name, port, False
        self.index = sim.mesh.actor(name).index
        self.streams = {}

    def ask(self, stream):
        submit = stream.submit
        self.streams[submit.request] = stream
        self.port.send(LinkKind.SUBMIT, submit, "router-0")
        if stream.abort_ns is not None:
            self.sim.at(stream.at_ns + stream.abort_ns, lambda: self.leave(stream))

    def leave(self, stream):
        stream.cancelled = True
        if stream.group is not None and not stream.end:
            self.cancel(stream)

    def cancel(self, stream):
        cancel = Cancel(stream.group, stream.submit.request, stream.submit.attempt)
        self.port.send(LinkKind.STEER, cancel, f"group-{stream.group}")
        stream.end, stream.ended_ns = "cancelled", self.sim.clock.now()

    def receive(self, _kind, message):
        match message:
            case Accepted():
                stream = self.streams[message.request]
                self.sim.expect(stream.group is None, f"{message.request} was accepted twice")
                stream.group = message.group
                if stream.cancelled and not stream.end:
                    self.cancel(stream)
            case Rejected() | Failed():
                stream = self.streams[message.request]
                if not stream.end:
                    stream.end, stream.reason = f"error {message.status}", message.reason
                    stream.ended_ns = self.sim.clock.now()
            case Emit():
                self.sim.expect(message.gateway == self.index, "an Emit of another gateway")
                for item in message.items:
                    self.take(item, message.group)

    def score(self, stream, found):
        name = f"stream {stream.submit.request}"
        self.sim.expect(not stream.tokens, f"{name}: log-probabilities of its prompt after its first token")
        self.sim.expect(found.start == stream.scored, f"{name}: position {found.start} after {stream.scored} positions")
        self.sim.expect(found.top == stream.submit.prompt_logprobs, f"{name}: {found.top} alternatives")
        stream.scored += found.count
        stream.scores.extend(found.rows)

    def take(self, item, group):
        stream = self.streams[item.request]
        if stream.end == "cancelled":
            return
        name = f"stream {item.request}"
        self.sim.expect(stream.group == group, f"{name}: tokens from group {group}, accepted by {stream.group}")
        self.sim.expect(not stream.end, f"{name}: tokens after its end")
        self.sim.expect(
            item.index == len(stream.tokens), f"{name}: index {item.index} after {len(stream.tokens)} tokens"
        )
        if item.prompt_logprobs is not None:
            self.score(stream, item.prompt_logprobs)
        stream.tokens.extend(item.tokens)
        if item.tokens or item.finish is Finish.LENGTH:
            right = scores(stream.submit)
            self.sim.expect(stream.scores == right, f"{name}: its prompt is scored {stream.scores}, {right} is right")
        self.sim.expect(
            len(stream.tokens) <= stream.credit, f"{name}: {len(stream.tokens)} tokens, credit {stream.credit}"
        )
        stream.first_ns = stream.first_ns or self.sim.clock.now()
        tokens, finish = self.sim.oracles[item.request]
        right = tokens[: len(stream.tokens)]
        self.sim.expect(stream.tokens == right, f"{name}: {stream.tokens} where {right} is right")
        if item.finish is not Finish.NONE:
            stream.end, stream.ended_ns = item.finish.value, self.sim.clock.now()
            whole = stream.tokens == tokens and stream.end == finish
            self.sim.expect(
                whole, f"{name}: {stream.end} after {len(stream.tokens)} tokens, {finish} after {len(tokens)}"
            )
        elif stream.slow and len(stream.tokens) == stream.credit:
            stream.credit += self.sim.random.randrange(1, 6)
            credit = Credit(group, item.request, stream.submit.attempt, stream.credit)
            self.sim.later(20 * MS, lambda: self.port.send(LinkKind.STEER, credit, f"group-{group}"))

    def settle(self):
        pass

    def deadline(self):
        return None

    def marks(self):
        return ()
