"""The mesh in one process on a virtual clock: real groups, barriers and router; simulated ranks, gateways and supervisors.

Everything random comes from one seed: delays (FIFO per link and pair, any order between links), batching, repeated
messages, step times, what clients ask and when they leave. An error names the seed that replays it.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random

from grammars import EOS, SimDesk, drawable
from kvshadow import VOCAB, Device, Slab, oracle
from msgspec import structs
from players import MS, SimGateway, SimRank, SimSupervisor, Stream

from edgemesh.actors.barrier import BarrierActor
from edgemesh.actors.group import GroupActor
from edgemesh.actors.router import RouterActor
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive, parse, resolve
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Role
from edgemesh.wire.messages import (
    Arrive,
    Begin,
    Cancel,
    Capacity,
    Credit,
    Health,
    LoadReport,
    Release,
    Sampling,
    Submit,
)

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
    scored: float = 0.3
    prompts_alone: float = 0.1
    repeats: float = 0.05
    delay_ms: float = 0.1
    step_ms: float = 1.0
    spikes: float = 0.02
    keys: int = 3
    codec: bool = False
    tick_bound: int = 20_000
    grammars: float = 0.0
    grammar_ms: float = 0.3


class SimulationError(AssertionError):
    """Something that must not happen; the message names the seed."""


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
        self.oracles = {stream.submit.request: oracle(stream.submit, drawable, EOS) for stream in self.streams}

    def make(self, name, port):
        match self.mesh.actor(name).role:
            case Role.SUPERVISOR:
                return SimSupervisor(self, name)
            case Role.RANK:
                return SimRank(self, name, port)
            case Role.GATEWAY:
                return SimGateway(self, name, port)
            case Role.GROUP:
                return GroupActor(self.mesh, name, 0, port, lambda _capacity: SimDesk(self, name))
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
        own = Random(self.seed * 1009 + number)
        prompt_logprobs = own.randrange(4) if own.random() < world.scored else -1
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
            prompt_logprobs=prompt_logprobs,
            grammar=self.grammar(),
        )
        if own.random() < world.prompts_alone:
            submit = structs.replace(submit, max_tokens=0)
        abort = int(random.expovariate(1 / (20 * MS))) if random.random() < world.aborts else None
        at = int(random.random() * world.spread_ms * MS)
        return Stream(submit, at, abort, slow, credit=credit)

    def grammar(self):
        random, world = self.random, self.world
        if not world.grammars or random.random() >= world.grammars:
            return ""
        return "bad" if random.random() < 0.1 else f"grammar-{random.randrange(10)}"

    # --- the run ---

    def begin(self):
        world = self.world
        capacity = Capacity(world.pages, world.page_tokens, world.longest, VOCAB, (EOS,), None, 0, 0)
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
