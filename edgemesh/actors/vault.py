"""The vault: holds the weights and KV memory of its host and lends them to ranks.

Loading and lending have threads of their own, so that the loop goes on answering the supervisor. A rank that starts anew
leases again and gets the very same bytes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edgemesh.engine.checkpoint import Checkpoint, open_checkpoint
from edgemesh.engine.lease import listen, receive_lease, same_user, send_message
from edgemesh.engine.locate import locate
from edgemesh.engine.shape import ModelShape, read_shape
from edgemesh.engine.special import special_tokens
from edgemesh.engine.store import Holdings, Store, UnknownLease
from edgemesh.engine.untrained import Untrained
from edgemesh.runtime.actor import main
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.port import Port, default_plane, supervisor_of
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.codec import WireError
from edgemesh.wire.ids import MAX_TEXT, Phase
from edgemesh.wire.messages import Capacity, Lease, Loading, Mark, Message, VaultReady

REPORT_NS: Final = 100_000_000
"""How often the loop looks how far loading is, and says so."""

RETRY_S: Final = 0.1

ANSWER_S: Final = 10.0
"""How long one rank may take to say what it wants and to take it."""


class VaultActor:
    """One host's vault."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: Port) -> None:
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.done = False
        self._supervisor = supervisor_of(mesh, name)
        self._since = monotonic_ns()
        self._loader = Loader(mesh, mesh.actor(name).host)
        self._said: tuple[str, int, int] | None = None
        self._lender: Lender | None = None
        self._loader.start()

    def receive(self, kind: LinkKind, message: Message) -> None:
        """Nothing of what the supervisor commands changes what a vault does; the loop itself obeys Stop."""

    def settle(self) -> None:
        """Say how far loading is; once it is over, begin to lend. Raises what stopped the loading."""
        if self._lender is not None:
            return
        if (said := self._loader.progress) != self._said:
            self._said = said
            step, done, total = said
            self.port.send(LinkKind.REPORT, Loading(self.name, self.epoch, step, done, total), self._supervisor)
        if not self._loader.over:
            return
        store, capacity = self._loader.result()
        for step, took_ns, nbytes in self._loader.steps:
            self.port.trace.event("load.step", step=step, ns=took_ns, bytes=nbytes)
        self._lender = Lender(store, capacity, self._socket(), self.port.trace.event)
        self._lender.start()
        self._since = monotonic_ns()
        self.port.send(
            LinkKind.REPORT, VaultReady(self.name, self.epoch, capacity, store.budget()[:MAX_TEXT]), self._supervisor
        )

    def deadline(self) -> int | None:
        """The next look at the loader."""
        return None if self._lender is not None else self.port.now() + REPORT_NS

    def marks(self) -> tuple[Mark, ...]:
        """Loading, or waiting for ranks."""
        phase = Phase.LOADING if self._lender is None else Phase.WAITING
        return (Mark(default_plane(self.mesh, self.name), 0, phase, self._since, 0),)

    def _socket(self) -> Path:
        link = next(link for link in self.mesh.links_of(self.name) if link.kind is LinkKind.LEASE)
        return Path(link.endpoint.removeprefix("ipc://"))


class Loader(threading.Thread):
    """Reads the model into shared memory; ``progress`` is (step, bytes done, bytes in all), replaced as a whole."""

    def __init__(self, mesh: Mesh, host: int) -> None:
        super().__init__(name="loader", daemon=True)
        self.progress = ("opening the model", 0, 0)
        self.steps: list[tuple[str, int, int]] = []
        self._mesh = mesh
        self._host = host
        self._result: tuple[Holdings, Capacity] | None = None
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether there is a result or an error."""
        return self._result is not None or self._error is not None

    def result(self) -> tuple[Holdings, Capacity]:
        """What was loaded. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def run(self) -> None:
        """Load; the outcome is kept for ``result``."""
        try:
            self._result = self._load()
        except Exception as error:  # noqa: BLE001 - it is raised again in the actor's own thread
            self._error = error

    def _load(self) -> tuple[Holdings, Capacity]:
        topology = self._mesh.topology
        directory = locate(topology.model.path)
        with contextlib.suppress(FileExistsError):
            # The gateways of this host read the tokenizer there.
            (Path(self._mesh.run_dir) / "model").symlink_to(directory)
        began = monotonic_ns()
        if topology.engine.kind == "null":
            shape = read_shape(directory / "config.json", topology.model.dtype)
            store: Holdings = (empty := Store(self._mesh, self._host, shape))
            kv = empty.measure()
        else:
            store = self._filled(directory)
            began = monotonic_ns()
            kv = store.allot()
        self.steps.append(("KV memory", monotonic_ns() - began, store.kv_bytes))
        eos, bos = special_tokens(directory, store.shape.vocab)
        return store, Capacity(
            pages=kv.pages,
            page_tokens=kv.page_tokens,
            max_model_len=kv.max_model_len,
            vocab_size=store.shape.vocab,
            eos_token_ids=eos,
            bos_token_id=bos,
            weights_bytes=store.weights_bytes,
            kv_bytes=store.kv_bytes,
        )

    def _filled(self, directory: Path) -> Holdings:
        began = monotonic_ns()
        checkpoint = self._checkpoint(directory)
        try:
            store = self._store(checkpoint.shape)
            total, done = store.weights_bytes, 0
            self.steps.append(("opening the model", monotonic_ns() - began, 0))

            def progress(name: str, nbytes: int) -> None:
                nonlocal done
                done += nbytes
                self.progress = (f"reading {name}", min(done, total), total)

            began = monotonic_ns()
            store.load(checkpoint, progress)
            self.steps.append(("reading weights", monotonic_ns() - began, total))
        finally:
            checkpoint.close()
        return store

    def _checkpoint(self, directory: Path) -> Checkpoint:
        topology = self._mesh.topology
        if topology.model.weights == "random":
            return Untrained(directory, topology.model.dtype, topology.engine.device)
        return open_checkpoint(directory, topology.model.dtype)

    def _store(self, shape: ModelShape) -> Holdings:
        if self._mesh.topology.engine.device == "cpu":
            return Store(self._mesh, self._host, shape)
        from edgemesh.engine.cuda.vault import CardStore  # noqa: PLC0415 - where there are cards

        return CardStore(self._mesh, self._host, shape)


class Lender(threading.Thread):
    """Answers leases, one after the other, for as long as the process lives."""

    def __init__(self, store: Holdings, capacity: Capacity, path: Path, event: Callable[..., None]) -> None:
        super().__init__(name="lender", daemon=True)
        self._store = store
        self._capacity = capacity
        self._event = event
        self._server = listen(path)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:  # out of descriptors, or a peer that left at once
                self._event("lease.broken", error=str(error))
                time.sleep(RETRY_S)
                continue
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """One lease; a peer that misbehaves is traced and dropped, and the next one served."""
        connection.settimeout(ANSWER_S)
        try:
            if not same_user(connection):
                self._event("link.refused", kind=LinkKind.LEASE, error="the peer runs as another user")
                return
            lease = receive_lease(connection)
            grant, descriptors = self._store.grant(lease, self._capacity)
            send_message(connection, grant, descriptors)
            self._event("lease.granted", rank=lease.rank, plane=lease.plane, lease_epoch=lease.epoch)
        except WireError as error:
            self._event("link.undecodable", kind=LinkKind.LEASE, error=str(error))
        except UnknownLease as error:
            self._event("link.refused", kind=LinkKind.LEASE, message_type=Lease.__name__, error=str(error))
        except (OSError, EOFError) as error:
            self._event("lease.broken", error=str(error))
        except Exception as error:  # noqa: BLE001 - one rank's trouble must not end the lending to others
            self._event("actor.fault", error=repr(error))


if __name__ == "__main__":
    main(VaultActor)
