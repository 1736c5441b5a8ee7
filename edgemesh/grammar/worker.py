"""The process in which grammars are worked out, one question after the other, for whoever started it.

``python -m edgemesh.grammar.worker --socket FD --tokenizer PATH --vocab N --eos ID ...``. It ends when the other end of its
socket is closed. Its memory has a bound, and so has its processor's time for each question: what goes beyond ends it.
"""

import argparse
import resource
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgemesh.grammar.matching import GrammarError, Grammars, Matcher
from edgemesh.grammar.notes import CPU_S, Advance, Close, Found, Open, Question, Questions, Started, packed

MEMORY_BYTES: Final = 3 << 30
"""Address space: of large tokenizers about one gigabyte, the rest is for grammars."""

MAX_TOKENIZER_BYTES: Final = 256 << 20
RECEIVE_BYTES: Final = 1 << 18


class Worker:
    """Matchers by the key of their stream."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}

    def answer(self, question: Question) -> Found | None:
        """Work a question out; None where no answer is wanted."""
        if isinstance(question, Close):
            self._matchers.pop(question.key, None)
            return None
        began = time.perf_counter_ns()
        try:
            if isinstance(question, Open):
                self._matchers[question.key] = self._grammars.matcher(question.source)
            return self._follow(question, began)
        except GrammarError as error:
            self._matchers.pop(question.key, None)
            return Found(question.key, error=str(error))

    def _follow(self, question: Open | Advance, began: int) -> Found:
        key = question.key
        matcher = self._matchers[key]
        compiled = time.perf_counter_ns()
        for at, token in enumerate(question.tokens):
            if not matcher.accept(token):
                del self._matchers[key]
                reason = f"token {token}, the {at + 1}. of the last {len(question.tokens)}, does not fit the grammar"
                return Found(key, error=reason, drawn=True)
        mask = matcher.mask()
        spent_ns = time.perf_counter_ns() - compiled
        compile_ns = compiled - began if isinstance(question, Open) else 0
        return Found(key, b"" if matcher.ended else mask, matcher.ended, compile_ns=compile_ns, mask_ns=spent_ns)


def serve(end: socket.socket, tokenizer: Path, eos: Sequence[int], vocab: int, cpu_s: float) -> None:
    """Say that the work can begin, or why not; then answer until the socket is closed."""
    try:
        if tokenizer.stat().st_size > MAX_TOKENIZER_BYTES:
            message = f"tokenizer.json is larger than {MAX_TOKENIZER_BYTES >> 20} MiB"
            raise GrammarError(message)  # noqa: TRY301 - told like the library's own
        worker = Worker(Grammars(tokenizer.read_bytes(), eos, vocab))
    except (GrammarError, OSError) as error:
        end.sendall(packed(Started(f"no grammar can be used with this model: {error}")))
        return
    end.sendall(packed(Started()))
    questions = Questions()
    while data := end.recv(RECEIVE_BYTES):
        for question in questions.feed(data):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = worker.answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if answer is not None:
                end.sendall(packed(answer))


def main(arguments: Sequence[str] | None = None) -> None:
    """Set the bounds, then serve."""
    parser = argparse.ArgumentParser(description="Works grammars out; a group or gateway starts it.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="*", default=[])
    parser.add_argument("--cpu-s", type=float, default=CPU_S)
    parser.add_argument("--name", default="grammar")
    found = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=found.socket) as end:
        serve(end, found.tokenizer, found.eos, found.vocab, found.cpu_s)


if __name__ == "__main__":
    main()
