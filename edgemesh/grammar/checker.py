"""The process that tries grammars out before a request goes on with one.

``python -m edgemesh.grammar.checker --socket FD --tokenizer PATH --vocab N --eos ID ...``; it ends when the other end of its
socket is closed. A grammar is a client's, and the library's own limits are no guarantee: so each trial is a fork of its own, in which the
kernel bounds time on the processor, time on the clock, and memory. What ends it there is the answer, and costs no one else anything.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from edgemesh.grammar.matching import GrammarError, Grammars
from edgemesh.grammar.trials import LENGTH, Trial, Verdict, framed

CPU_S: Final = 1.0
WALL_S: Final = 30.0
MEMORY_BYTES: Final = 512 << 20
"""On top of what the process has before a trial."""

MASK_NS: Final = 100_000_000
"""Time on the processor that one token may take once the grammar is compiled; the group's other constrained streams wait for it."""

WALK: Final = 16
"""Tokens of each walk through a grammar: some limits are met only after a few."""

REASON_BYTES: Final = 4096
NICE: Final = 5
PR_SET_PDEATHSIG: Final = 1
_REASONS: Final = {
    "NoExtensionBias": "no text satisfies it",
    "oneOf constraints are not supported": "`oneOf` is only supported where no value can fit two of its schemas; use `anyOf`",
}
_TIMES: Final = {
    int(signal.SIGPROF): f"it takes more than {CPU_S:g} s to work out",
    int(signal.SIGALRM): f"it could not be worked out within {WALL_S:g} s",
}


def try_out(grammars: Grammars, source: str) -> str:
    """Why no output can be made after ``source``, or nothing; some of its outputs are begun."""
    try:
        for draw in (_lowest, _scattered):
            matcher = grammars.matcher(source)
            mask = matcher.mask()
            for place in range(WALK):
                if matcher.ended:
                    break
                matcher.accept(draw(mask, place))
                start = time.process_time_ns()
                mask = matcher.mask()
                if time.process_time_ns() - start > MASK_NS:
                    return f"to work out one token takes more than {MASK_NS / 1e9:g} s"
    except GrammarError as error:
        return _plainly(str(error))
    return ""


def _plainly(reason: str) -> str:
    """The library's words, or better ones where it names its own options and states."""
    for beginning, words in _REASONS.items():
        if reason.startswith(beginning):
            return words
    return reason.replace("<non-verbose/>", "").strip()


def _lowest(mask: bytes, place: int) -> int:
    """The first allowed id: in most vocabularies one of a single character."""
    del place
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _scattered(mask: bytes, place: int) -> int:
    """An allowed id somewhere in the vocabulary, another one at each place."""
    bits = int.from_bytes(mask, "little")
    above = bits >> (place * 7919 + 104729) % (8 * len(mask))
    return (
        bits.bit_length() - 1
        if not above
        else bits.bit_length() - above.bit_length() + (above & -above).bit_length() - 1
    )


class Checker:
    """Trials under way, by the pipe on which each tells its verdict."""

    def __init__(self, end: socket.socket, grammars: Grammars) -> None:
        self._end = end
        self._grammars = grammars
        self._buffer = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the socket is closed."""
        while True:
            for found, _ in self._selector.select():
                if found.data is not None:
                    self._finish(found.fd, *found.data)
                elif not self._receive():
                    return

    def _receive(self) -> bool:
        data = self._end.recv(1 << 18)
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            trial = msgspec.msgpack.decode(bytes(self._buffer[LENGTH.size : end]), type=Trial)
            del self._buffer[:end]
            self._start(trial)
        return bool(data)

    def _start(self, trial: Trial) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _confine(parent)
                os.write(writing, try_out(self._grammars, trial.source).encode()[:REASON_BYTES])
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        self._selector.register(reading, selectors.EVENT_READ, (trial.key, pid))

    def _finish(self, reading: int, key: int, pid: int) -> None:
        self._selector.unregister(reading)
        fault = os.read(reading, REASON_BYTES).decode(errors="replace")
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            fault = _TIMES.get(-code, "to work it out takes too much memory, or it is nested too deeply")
        self._end.sendall(framed(Verdict(key, fault, busy=code == -signal.SIGALRM)))


def _confine(parent: int) -> None:
    """Bound what this process may take; each bound ends it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_S),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_S),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the tokenizer, then serve."""
    parser = argparse.ArgumentParser(description="Tries grammars out; a gateway starts it.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="*", default=[])
    parser.add_argument("--name", default="checker")
    found = parser.parse_args(arguments)
    os.nice(NICE)
    with socket.socket(fileno=found.socket) as end:
        try:
            grammars = Grammars(found.tokenizer.read_bytes(), found.eos, found.vocab)
        except (GrammarError, OSError) as error:
            # It is said before the socket closes: whoever sees that kills this process.
            sys.stderr.write(f"no grammar can be used with this model: {error}\n")
            sys.stderr.flush()
            sys.exit(1)
        gc.freeze()
        Checker(end, grammars).serve()


if __name__ == "__main__":
    main()
