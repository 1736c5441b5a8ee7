"""CURVE keys for the links between hosts: each host proves itself, and nothing crosses a network in the clear.

``DIR/host-<i>.key_secret`` is host i's own pair, ``DIR/host-<i>.key`` its public half, which every other host has.
"""

from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from edgemesh.runtime.link import LinkError
from edgemesh.topology import Link, Mesh


class Curve:
    """The keys of one host of a mesh, set on the sockets of links between hosts."""

    def __init__(self, mesh: Mesh, host: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._mesh, self._host = mesh, host
        keys = mesh.topology.mesh.keys_dir
        self._directory = Path(keys).expanduser() if keys else None
        self._context = context
        self._authenticator: ThreadAuthenticator | None = None

    def protect(self, socket: zmq.Socket[bytes], link: Link, *, bind: bool) -> None:
        """Set the keys of a socket that leaves the host; raises ``LinkError`` where there are none."""
        if self._directory is None:
            text = f"{link.endpoint} leaves the host, and mesh.keys_dir names no CURVE keys; links in the clear are refused"
            raise LinkError(text)
        public, secret = self._load(self._directory / f"host-{self._host}.key_secret")
        socket.curve_publickey, socket.curve_secretkey = public, secret
        if bind:
            self._authenticate(self._directory)
            socket.curve_server = True
        else:
            peer = self._mesh.actor(link.binder).host
            socket.curve_serverkey = self._load(self._directory / f"host-{peer}.key")[0]

    def close(self) -> None:
        """Stop the thread that checks who connects."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _authenticate(self, directory: Path) -> None:
        """Let in only the hosts whose public keys are in the directory."""
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="*", location=str(directory))

    @staticmethod
    def _load(path: Path) -> tuple[bytes, bytes | None]:
        try:
            return zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            text = f"the CURVE key {path} cannot be read: {error}"
            raise LinkError(text) from error
