"""The mesh in one process on a virtual clock: real groups, barriers and router; simulated ranks, gateways and supervisors.

Everything random comes from one seed: delays (FIFO per link and pair, any order between links), batching, repeated
messages, step times, what clients ask and when they leave. An error names the seed that replays it.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random

from kvshadow import VOCAB, Device, Slab, oracle

from edgemesh.actors.barrier import BarrierActor
from edgemesh.actors.group import GroupActor
from edgemesh.actors.router import RouterActor
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive, parse, resolve
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Finish, Layout, Phase, Role
from edgemesh.wire.messages import (
    Accepted,
    Arrive,
    Attached,
    Begin,
    Cancel,
    Capacity,
    Credit,
    Done,
    Drained,
    Emit,
    Failed,
    Fault,
    Health,
    IdleDone,
    IdlePlan,
    LoadReport,
    Mark,
    Plan,
    Ready,
    Rejected,
    Release,
    Sampling,
    Submit,
)

MS = 1_000_000
REPEATABLE = (Arrive, Release, LoadReport, Credit, Cancel)


@dataclass
class World:
    """What may go wrong, and how much is asked for."""

    text: str
    pages: int = 40
    page_tokens: int = 4
    longest: int = 96
    requests: int = 30
    spread_ms: float = 60.0
    max_prompt: int = 50
    max_out: int = 24
    documents: int = 3
    aborts: float = 0.0
    retries: float = 0.0
    slow_clients: float = 0.0
    stops: float = 0.3
    repeats: float = 0.05
    delay_ms: float = 0.1
    step_ms: float = 1.0
    spikes: float = 0.02
    keys: int = 3
    codec: bool = False
    tick_bound: int = 20_000


class SimulationError(AssertionError):
    """Something that must not happen; the message names the seed."""


@dataclass
class Stream:
    """A request as its client sees it."""

    submit: Submit
    at_ns: int
    abort_ns: int | None = None
    slow: bool = False
    group: int | None = None
    tokens: list = field(default_factory=list)
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
        stream.tokens.extend(item.tokens)
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


class Simulation:
    """One mesh, one seed, one run."""

    def __init__(self, seed, world, streams=None):
        self.seed, self.world, self.random = seed, world, Random(seed)
        self.mesh = derive(resolve(parse(world.text)), "/run/sim")
        self.clock = VirtualClock()
        self.net = MemoryNet(self.mesh, self.clock.now, self.on_send, codec=world.codec)
        self.heap, self.count = [], 0
        self.actors, self.mailbox, self.woken, self.frozen = {}, {}, {}, set()
        self.lanes, self.verdicts, self.plans, self.steps = {}, {}, {}, {}
        self.ports = {}
        groups = self.mesh.groups
        self.devices = {group: Device(Slab(world.pages, world.page_tokens)) for group in groups}
        for actor in self.mesh.actors:
            if actor.role is not Role.VAULT:
                self.ports[actor.name] = self.net.port(actor.name)
        for name, port in self.ports.items():
            self.mailbox[name] = deque()
            self.actors[name] = self.make(name, port)
        self.groups = [self.actors[f"group-{group}"] for group in groups]
        self.gateways = [actor for actor in self.actors.values() if isinstance(actor, SimGateway)]
        self.streams = streams or [self.request(number) for number in range(world.requests)]
        self.oracles = {stream.submit.request: oracle(stream.submit) for stream in self.streams}

    def make(self, name, port):
        match self.mesh.actor(name).role:
            case Role.SUPERVISOR:
                return SimSupervisor(self, name)
            case Role.RANK:
                return SimRank(self, name, port)
            case Role.GATEWAY:
                return SimGateway(self, name, port)
            case Role.GROUP:
                return GroupActor(self.mesh, name, 0, port)
            case Role.ROUTER:
                return RouterActor(self.mesh, name, 0, port)
            case _:
                return BarrierActor(self.mesh, name, 0, port)

    def expect(self, holds, message):
        if not holds:
            text = f"seed {self.seed} at {self.clock.now() / MS:.3f} ms: {message}"
            raise SimulationError(text)

    # --- time and messages ---

    def at(self, when_ns, action):
        self.count += 1
        heapq.heappush(self.heap, (max(when_ns, self.clock.now()), self.count, action))

    def later(self, mean_ns, action):
        spike = 50 if self.random.random() < self.world.spikes else 1
        self.at(self.clock.now() + int(self.random.expovariate(1 / mean_ns) * spike), action)

    def on_send(self, sent):
        repeats = 1 + (isinstance(sent.message, REPEATABLE) and self.random.random() < self.world.repeats)
        lane = (sent.source, sent.to, sent.kind)
        for _ in range(repeats):
            spike = 50 if self.random.random() < self.world.spikes else 1
            delay = int(self.random.expovariate(1 / (self.world.delay_ms * MS)) * spike)
            when = max(self.clock.now() + delay, self.lanes.get(lane, 0) + 1)
            self.lanes[lane] = when
            self.at(when, lambda: self.deliver(sent))

    def deliver(self, sent):
        if not self.net.is_present(sent.to):
            return
        message = self.net.admit(sent)
        self.expect(message is not None, f"{sent.to} refused {sent.message}")
        self.mailbox[sent.to].append((sent.kind, message))
        self.wake(sent.to)

    def wake(self, name, when_ns=0):
        """Have the actor's loop turn; an earlier turn that is due already does as well."""
        when = max(when_ns, self.clock.now() + self.random.randrange(int(0.05 * MS)))
        due = self.woken.get(name)
        if due is None or when < due:
            self.woken[name] = when
            self.at(when, lambda: self.turn(name, when))

    def turn(self, name, when):
        if self.woken.get(name) != when or name in self.frozen:
            return
        del self.woken[name]
        actor, box = self.actors[name], self.mailbox[name]
        for _ in range(min(len(box), self.random.randrange(1, 64))):
            actor.receive(*box.popleft())
        actor.settle()
        if isinstance(actor, GroupActor) and actor.scheduler is not None:
            actor.scheduler.check()
            actor.scheduler.state.prefix.check()
        if box:
            self.wake(name)
        deadline = actor.deadline()
        if deadline is not None:
            self.wake(name, deadline)

    def join(self, rank, plan):
        """A step ends once every rank of the coupled set is in it."""
        key = (rank.set.index, plan.plane, plan.tick)
        inside = self.steps.setdefault(key, [])
        inside.append((rank, plan))
        if len(inside) == len(self.mesh.world_of(rank.set.index)):
            del self.steps[key]
            step_ns = int(self.random.expovariate(1 / (self.world.step_ms * MS)))
            for each, its in inside:
                self.later(step_ns + 1, lambda each=each, its=its: each.finish(its, step_ns))

    # --- what is asked ---

    def request(self, number):
        random, world = self.random, self.world
        document = Random(random.randrange(world.documents)) if world.documents else random
        length = random.randrange(1, world.max_prompt + 1)
        shared = random.randrange(length + 1)
        prompt = [document.randrange(VOCAB) for _ in range(shared)] + [
            random.randrange(VOCAB) for _ in range(length - shared)
        ]
        stops = tuple(random.sample(range(VOCAB), 5)) if random.random() < world.stops else ()
        sampling = Sampling(
            seed=random.randrange(4), stop_token_ids=stops, min_tokens=random.randrange(6), repetition_penalty=1.0
        )
        slow = random.random() < world.slow_clients
        credit = random.randrange(1, 4) if slow else 1 << 20
        submit = Submit(
            request=f"r{number}",
            attempt=0,
            gateway=random.randrange(self.mesh.topology.gateway.processes),
            prompt=TokenArray.of(prompt),
            sampling=sampling,
            max_tokens=random.randrange(1, min(world.max_out, world.longest - length) + 1),
            key=f"key-{random.randrange(world.keys)}",
            session=random.choice(["", "s1", "s2"]),
            pin=random.choice([None, None, None, random.choice(self.mesh.groups)]),
            credit=credit,
            priority=random.choice([0, 0, -2, 3]),
        )
        abort = int(random.expovariate(1 / (20 * MS))) if random.random() < world.aborts else None
        at = int(random.random() * world.spread_ms * MS)
        return Stream(submit, at, abort, slow, credit=credit)

    # --- the run ---

    def begin(self):
        world = self.world
        capacity = Capacity(world.pages, world.page_tokens, world.longest, VOCAB, (), None, 0, 0)
        for supervisor in self.mesh.actors_of(Role.SUPERVISOR):
            for link in self.mesh.links_of(supervisor.name):
                if link.kind is LinkKind.COMMAND:
                    for name in link.receivers:
                        if name in self.actors:
                            self.ports[supervisor.name].send(LinkKind.COMMAND, Begin(0, capacity), name)
        self.run(lambda: False)
        ready = set().union(*(each.ready for each in self.actors.values() if isinstance(each, SimSupervisor)))
        missing = {name for name in self.actors if name.startswith(("group", "router", "barrier"))} - ready
        self.expect(not missing, f"{missing} never became ready")
        self.expect(not self.plans, "plans before any request")
        self.ports["supervisor-0"].send(LinkKind.COMMAND, Health(0, serving=True), "router-0")
        self.run(lambda: False)
        for stream in self.streams:
            stream.at_ns += self.clock.now()
            self.at(stream.at_ns, lambda stream=stream: self.ask(stream))

    def ask(self, stream):
        gateway = self.gateways[stream.submit.gateway]
        if gateway.name not in self.frozen:
            gateway.ask(stream)

    def run(self, enough):
        """Let events happen until there is none left, or ``enough``."""
        while self.heap and not enough():
            when, _, action = heapq.heappop(self.heap)
            self.clock.move_to(when)
            try:
                action()
            except SimulationError:
                raise
            except Exception as error:
                text = f"seed {self.seed} at {self.clock.now() / MS:.3f} ms: {type(error).__name__}: {error}"
                raise SimulationError(text) from error
            self.expect(len(self.verdicts) <= self.world.tick_bound, f"{len(self.verdicts)} ticks and no end")

    def play(self):
        """The whole: start and finish."""
        self.begin()
        return self.finish()

    def finish(self):
        """Serve until nothing moves, and prove that nothing is left over."""
        self.run(lambda: False)
        left = [stream.submit.request for stream in self.streams if not stream.end]
        self.expect(not left, f"nothing moves any more, and {left} have not ended; {self.standing()}")
        for group in self.groups:
            state = group.scheduler.state
            self.expect(not state.live, f"{group.name} still has {list(state.live)}")
            self.expect(group.scheduler.quiet, f"{group.name} is not quiet: {self.standing()}")
            self.expect(
                state.pages.free == state.pages.usable,
                f"{group.name}: {state.pages.free} pages of {state.pages.usable} are free",
            )
            report = group.scheduler.load(0)
            self.expect(report.running == report.waiting == report.outstanding_tokens == 0, f"{group.name}: {report}")
        for plane in self.mesh.planes:
            for each in self.mesh.sets:
                ticks = sorted(tick for index, its, tick in self.verdicts if (index, its) == (each.index, plane))
                self.expect(ticks == list(range(len(ticks))), f"ticks of {plane}: {ticks}")
        return self

    def standing(self):
        """Where every plane of every group stands, for a message."""
        return {
            group.name: {
                plane.value: (pipe.tick, pipe.arrived, [step.tick for step in pipe.flying])
                for plane, pipe in group.scheduler.state.pipelines.items()
            }
            for group in self.groups
        }

    def events(self, name):
        return [fields for port in self.ports.values() for fields in port.trace.named(name)]
