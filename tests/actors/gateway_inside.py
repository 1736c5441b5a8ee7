"""A gateway's service inside the test's own loop, with a mesh that answers at once, and a neighbour that counts its turns."""

import asyncio
import sys
import time
from datetime import datetime
from types import SimpleNamespace

from gateway_fake_mesh import TEMPLATE, tiny_tokenizer

from edgemesh.actors.gateway import SWITCH_S
from edgemesh.actors.gateway_app import Application
from edgemesh.actors.gateway_http import Bodies
from edgemesh.actors.gateway_keys import ApiKeys
from edgemesh.actors.gateway_metrics import Metrics
from edgemesh.actors.gateway_quota import Quotas
from edgemesh.actors.gateway_service import Model, Service
from edgemesh.api.limits import Limits
from edgemesh.api.text import ModelText
from edgemesh.runtime.ledger import Ledger
from edgemesh.wire.ids import Finish
from edgemesh.wire.messages import Emit, Item, Logprob, Submit

MOST = 16 << 20
BEAT_S = 0.001


class Inside:
    """One gateway's service; a request of it is answered with ``tokens`` tokens, all at once."""

    def __init__(self, *, tokens=1, context=1 << 17, metrics=None):
        tokenizer = tiny_tokenizer().to_str().encode()
        text = ModelText(tokenizer, b"{}", TEMPLATE, clock=time.monotonic_ns, now=datetime.now)
        self.tokens = tokens
        self.submits = []
        self.answered = self.answered_before_the_last = 0
        self.pieces = []
        """How many bytes each part of the last answer had."""

        trace = SimpleNamespace(event=lambda *_, **__: None)
        port = SimpleNamespace(trace=trace, send=self._send, now=time.monotonic_ns)
        self.service = Service(
            port,
            index=0,
            metrics=metrics or Metrics("gateway-0"),
            keys=ApiKeys(),
            quotas=Quotas(Ledger(), time.monotonic_ns, lambda _: None),
            bodies=Bodies(MOST, MOST),
            max_streams=1024,
        )
        self.vocab = text.tokenizer.get_vocab_size()
        self.service.model = Model(text, Limits("m", context, self.vocab, (0,), 1))
        self.service.serving = True
        self.application = Application(self.service)

    def _send(self, _kind, message, _to):
        if isinstance(message, Submit):
            self.submits.append(message)
            self.answered_before_the_last = self.answered
            asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, submit):
        self.answered += 1
        wanted = submit.sampling.logprobs
        count = min(self.tokens, submit.max_tokens)
        tokens = tuple(1 + place % (self.vocab - 1) for place in range(count))
        top = tuple((place, -1.0 - place) for place in range(wanted))
        logprobs = tuple(Logprob(token, -1.0, top) for token in tokens) if wanted >= 0 else ()
        item = Item(submit.request, submit.attempt, 0, tokens, Finish.LENGTH, logprobs, 0)
        self.service.streams.receive(Emit(0, 0, 0, (item,)))

    async def post(self, path, body):
        """(status, answer) of a request."""
        sent = []

        async def receive():
            if body is not None and not sent:
                sent.append(True)
                return {"type": "http.request", "body": body}
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        answers = []

        async def send(message):
            answers.append(message)

        method = "GET" if body is None else "POST"
        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "root_path": ""}
        await self.application(scope, receive, send)
        parts = [each.get("body", b"") for each in answers[1:]]
        self.pieces = list(map(len, parts))
        return answers[0]["status"], b"".join(parts)

    def turns_beside(self, path, body, least=0):
        """(turns of a neighbour while a request is answered, its status, its answer).

        A busy machine may leave the neighbour few turns, but not every time; the lock passes on as in a gateway's process.
        """

        async def both():
            turns = 0

            async def neighbour():
                nonlocal turns
                while True:
                    await asyncio.sleep(BEAT_S)
                    turns += 1

            beating = asyncio.create_task(neighbour())
            status, answer = await self.post(path, body)
            beating.cancel()
            return turns, status, answer

        before, most = sys.getswitchinterval(), 0
        sys.setswitchinterval(SWITCH_S)
        try:
            for _ in range(5):
                turns, status, answer = asyncio.run(both())
                most = max(most, turns)
                if most >= least or status != 200:
                    break
            return most, status, answer
        finally:
            sys.setswitchinterval(before)
