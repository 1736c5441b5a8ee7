"""An actor of any role that keeps the protocol of start and end, and misbehaves as $FAKE says.

FAKE is JSON: {actor name: behaviour}. Behaviours: silent (never says hello), never_ready, crash (after Begin),
hang (its step outlasts its bound), mute (no more reports once it serves), exit (code 3 once it serves),
slow_drain (drained only at the deadline), stuck (its loop hangs once it serves; bounds are short then).
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from edgemesh.runtime import progress
from edgemesh.runtime.actor import main
from edgemesh.runtime.port import default_plane, supervisor_of
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase, Role
from edgemesh.wire.messages import Begin, Capacity, Drain, Drained, Health, Loading, Mark, Ready, VaultReady

CAPACITY = Capacity(
    pages=8,
    page_tokens=16,
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=(0,),
    bos_token_id=None,
    weights_bytes=0,
    kv_bytes=0,
)


class FakeActor:
    def __init__(self, mesh, name, epoch, port):
        self.mesh, self.name, self.epoch, self.port = mesh, name, epoch, port
        self.done = False
        self.role = mesh.actor(name).role
        self.boss = supervisor_of(mesh, name)
        self.how = json.loads(os.environ.get("FAKE", "{}")).get(name, "")
        self.phase, self.since, self.bound, self.due = Phase.CONNECTING, port.now(), 0, None
        self.marked = Path(mesh.topology.trace.dir) / "gateway-0.health"
        # Something that a supervisor which forgets its children would leave behind.
        if self.how == "child":
            os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
        if self.role is Role.VAULT and self.how != "never_ready":
            port.send(LinkKind.REPORT, Loading(name, epoch, "reading", 5 << 20, 10 << 20), self.boss)
            port.send(LinkKind.REPORT, VaultReady(name, epoch, CAPACITY), self.boss)
            self.phase = Phase.WAITING

    def receive(self, kind, message):
        match message:
            case Begin():
                self.begin()
            case Drain() if self.role in (Role.GROUP, Role.GATEWAY):
                if self.how == "slow_drain":
                    self.due = message.deadline_ns - 300_000_000
                else:
                    self.port.send(LinkKind.REPORT, Drained(self.name, self.epoch), self.boss)
            case Health():
                with (Path(self.mesh.topology.trace.dir) / f"{self.name}.health").open("a") as file:
                    file.write(json.dumps([message.serving, message.draining, message.reason]) + "\n")

    def begin(self):
        if self.how == "crash":
            raise RuntimeError("the fake was told to crash")
        if self.how == "never_ready":
            return
        self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch), self.boss)
        self.phase = Phase.WAITING
        if self.how == "exit":
            threading.Timer(0.5, os._exit, (3,)).start()
        if self.how == "hang":
            self.phase, self.since, self.bound = Phase.RUNNING, self.port.now(), 300_000_000

    def settle(self):
        if self.due is not None and self.port.now() >= self.due:
            self.due = None
            self.port.send(LinkKind.REPORT, Drained(self.name, self.epoch), self.boss)

        if self.how == "stuck" and self.marked.exists():
            time.sleep(3600)

    def deadline(self):
        # One that will be stuck looks whether the mesh serves.
        return self.port.now() + 10_000_000 if self.how == "stuck" else self.due

    def marks(self):
        if self.how == "mute" and self.phase is Phase.WAITING:
            time.sleep(3600)
        return (Mark(default_plane(self.mesh, self.name), 7, self.phase, self.since, self.bound),)


def run():
    name = sys.argv[sys.argv.index("--name") + 1]
    if json.loads(os.environ.get("FAKE", "{}")).get(name) == "silent":
        time.sleep(3600)
    if "stuck" in os.environ.get("FAKE", ""):
        progress.SLOW_NS, progress.LOOP_BOUND_NS = 500_000_000, 2_000_000_000
    main(FakeActor)
