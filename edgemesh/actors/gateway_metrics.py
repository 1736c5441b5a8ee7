"""What ``/metrics`` says, in a registry of its own for each gateway process.

Every sample has the label ``gateway``: processes are told apart by it, and a sum over it is the whole. Where several
share a port, each leaves its text in a directory every second, so that whichever is asked answers for all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgemesh.api.replies import GatewayLoad, Load

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
SHARE_S: Final = 1.0
SUFFIX: Final = ".prom"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counts of one gateway."""

    def __init__(self, gateway: str, shared: Path | None = None) -> None:
        self.registry = CollectorRegistry()
        self._shared = shared
        self._share_due_s = 0.0
        if shared is not None:
            shared.mkdir(mode=0o700, exist_ok=True)
        self._requests = Counter(
            "edgemesh_requests",
            "Answered HTTP requests.",
            ["gateway", "endpoint", "status"],
            registry=self.registry,
        )
        self._gateway = gateway
        self._prompt = _counter("edgemesh_prompt_tokens", "Tokens of submitted prompts.", self.registry, gateway)
        self._cached = _counter("edgemesh_cached_tokens", "Prompt tokens found cached.", self.registry, gateway)
        self._generated = _counter("edgemesh_generated_tokens", "Tokens received.", self.registry, gateway)
        self._aborted = _counter("edgemesh_aborted_requests", "Hung-up requests.", self.registry, gateway)
        self._limited = Counter(
            "edgemesh_limited_requests",
            "Requests beyond a limit of their API key.",
            ["gateway", "limit"],
            registry=self.registry,
        )
        self._ended = Counter(
            "edgemesh_ended_connections",
            "Connections that were refused or cut.",
            ["gateway", "why"],
            registry=self.registry,
        )
        self._ttft = _histogram("edgemesh_ttft_seconds", "Arrival to first token.", self.registry, gateway)
        self._e2e = _histogram("edgemesh_e2e_seconds", "Arrival to last token.", self.registry, gateway)

    def watch(self, name: str, text: str, read: Callable[[], int]) -> None:
        """Show a number that is read when asked for."""
        gauge = Gauge(name, text, ["gateway"], registry=self.registry)
        gauge.labels(self._gateway).set_function(read)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request got its status."""
        self._requests.labels(self._gateway, endpoint, str(status)).inc()

    def aborted(self) -> None:
        """A client hung up."""
        self._aborted.inc()

    def limited(self, limit: str) -> None:
        """An API key's request was beyond this limit."""
        self._limited.labels(self._gateway, limit).inc()

    def ended(self, why: str) -> None:
        """A connection was refused or cut."""
        self._ended.labels(self._gateway, why).inc()

    def prompt(self, tokens: int) -> None:
        """A prompt was submitted."""
        self._prompt.inc(tokens)

    def generated(self, tokens: int) -> None:
        """Tokens came from a group."""
        self._generated.inc(tokens)

    def ttft(self, nanoseconds: int) -> None:
        """A stream's first token came this long after its request."""
        self._ttft.observe(nanoseconds / 1e9)

    def finished(self, nanoseconds: int, cached_tokens: int) -> None:
        """A stream ended this long after its request."""
        self._e2e.observe(nanoseconds / 1e9)
        self._cached.inc(cached_tokens)

    def share(self) -> None:
        """Leave this process's part where the others find it, once a second; on a full disk the last one stays."""
        if self._shared is None or monotonic() < self._share_due_s:
            return
        self._share_due_s = monotonic() + SHARE_S
        fresh = self._shared / f".{self._gateway}"
        with contextlib.suppress(OSError):
            fresh.write_bytes(generate_latest(self.registry))
            fresh.replace(self._shared / f"{self._gateway}{SUFFIX}")

    def text(self) -> bytes:
        """All of it, as Prometheus reads it; what others left included."""
        own, *others = self._texts()
        return merge([own, *others]) if others else own

    def _texts(self) -> list[bytes]:
        """This gateway's own, and what the others left last."""
        own = generate_latest(self.registry)
        paths = sorted(self._shared.glob(f"*{SUFFIX}")) if self._shared is not None else ()
        return [own, *(path.read_bytes() for path in paths if path.stem != self._gateway)]

    def load(self) -> Load:
        """What every gateway is answering; of others, what they left last."""
        found: dict[str, dict[str, int]] = {}
        for text in self._texts():
            for match in _OPEN.finditer(text.decode()):
                found.setdefault(match["gateway"], {})[match["name"]] = int(float(match["value"]))
        gateways = [
            GatewayLoad(gateway=name, open_requests=each.get("requests", 0), open_streams=each.get("streams", 0))
            for name, each in sorted(found.items())
        ]
        return Load(server_load=sum(each.open_requests for each in gateways), gateways=gateways)


_OPEN: Final = re.compile(
    r'^edgemesh_open_(?P<name>requests|streams)\{gateway="(?P<gateway>[^"]*)"\} (?P<value>\S+)$', re.MULTILINE
)


def merge(texts: Iterable[bytes]) -> bytes:
    """Several texts as one, in which each metric's description stands once, before all of its samples."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        family: list[bytes] = []
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                known = name in families
                family = families.setdefault(name, [])
                if not known:
                    family.append(line)
            elif not line.startswith(b"# TYPE ") or len(family) == 1:
                family.append(line)
    return b"".join(line for lines in families.values() for line in lines)


def _counter(name: str, text: str, registry: CollectorRegistry, gateway: str) -> Counter:
    return Counter(name, text, ["gateway"], registry=registry).labels(gateway)


def _histogram(name: str, text: str, registry: CollectorRegistry, gateway: str) -> Histogram:
    return Histogram(name, text, ["gateway"], registry=registry, buckets=SECONDS).labels(gateway)
