"""A thousand and twenty-four streams at once through one gateway: every answer right, and memory bounded."""

import asyncio
import contextlib
import json
import resource
import zlib
from pathlib import Path

import pytest
from e2e_clients import COMPLETIONS, body, events_of, text_of, words
from tokenizers import Tokenizer

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

STREAMS, TOKENS, PROMPTS = 1024, 12, 16
VOCABULARY = 49152
MOST_MB = 150
"""What a gateway may hold beyond what it held alone: a stream is not much more than its buffers."""


@pytest.fixture
def descriptors():
    """As many as the system grants: each stream is a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < STREAMS + 512:
        pytest.skip(f"this system grants {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_mb(served, what="VmRSS"):
    status = Path(f"/proc/{served.actors()['gateway-0']}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) / 1000


async def one(served, number, all_connected, connected):
    """One stream on a connection of its own, asked for once everyone is connected; the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        connected.append(number)
        await all_connected.wait()
        content = json.dumps(body(text=words(24, number % PROMPTS), max_tokens=TOKENS, stream=True)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def everyone(served):
    """All answers."""
    all_connected, connected = asyncio.Event(), []
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(served, number, all_connected, connected)) for number in range(STREAMS)]
        while len(connected) < STREAMS:  # noqa: ASYNC110 - each says so itself
            await asyncio.sleep(0.01)
        all_connected.set()
    return [task.result() for task in asked]


def chunks_of(said):
    """The body of an answer in chunks."""
    head, _, rest = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    found = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found, rest = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return found.decode()


class Right:
    """What the null engine's checksums make of a request, as its own file says: tokens of its id and their positions."""

    def __init__(self, served):
        (model,) = served.runtime.glob("*/model")
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        ends = json.loads((model / "config.json").read_text())["eos_token_id"]
        self._ends = {ends} if isinstance(ends, int) else set(ends)
        self._starts = [len(self._tokenizer.encode(words(24, number)).ids) for number in range(PROMPTS)]

    def text(self, request, number):
        seed, start = zlib.crc32(request.encode()), self._starts[number % PROMPTS]
        tokens = []
        for position in range(start, start + TOKENS):
            token = zlib.crc32(position.to_bytes(4, "little"), seed) % VOCABULARY
            tokens.append(next(each for each in range(token, token + 9) if each not in self._ends))
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_thousand_and_twenty_four_streams_are_all_answered_rightly(served, traces, descriptors):
    right = Right(served)
    before = resident_mb(served)
    answers = asyncio.run(everyone(served))
    most = resident_mb(served, "VmHWM")
    for number, said in enumerate(answers):
        events = events_of(chunks_of(said))
        assert text_of(events) == right.text(events[0]["id"], number)
    assert len({events_of(chunks_of(said))[0]["id"] for said in answers}) == STREAMS
    assert most - before < MOST_MB, f"{before:.0f} MB before, {most:.0f} MB at most"
    traces.settle()
    assert sorted(set(traces.groups().values())) == [0, 1, 2, 3]
