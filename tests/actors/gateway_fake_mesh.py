"""A real gateway process in a mesh whose other actors are scripted: a supervisor, a router and two groups, on real sockets.

A group's script is named by the request's affinity key (``session``); without one it says the prompt back. It keeps
the rules of a real one: a stream ends, is cancelled, or waits for credit.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from struct import pack

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgemesh.runtime.link import LinkError
from edgemesh.runtime.paths import make_run_dir, read_mesh
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Gateway, Group, MeshShape, Model, Topology
from edgemesh.topology import Trace as TraceSettings
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Finish
from edgemesh.wire.messages import (
    Accepted,
    Begin,
    Cancel,
    Capacity,
    Credit,
    Drained,
    Emit,
    Failed,
    Fault,
    Health,
    Hello,
    Item,
    Logprob,
    Progress,
    PromptLogprobs,
    Ready,
    Rejected,
    Stop,
    Submit,
)

PATIENCE_S = 120.0
"""How long a test waits for what must come; what is there is taken at once, however busy the machine is."""

EOS = 0
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "hello world " * 4]


def tiny_tokenizer():
    """A byte-level BPE of a few hundred tokens: most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS * 10, trainer)
    return tokenizer


class FakeStream:
    """One placed request as the scripted group sees it."""

    def __init__(self, submit, group, script):
        self.submit, self.group, self.script = submit, group, script
        self.tokens = list(script(submit))
        self.out = len(submit.emitted)
        self.scored = submit.scored
        self.credit = submit.credit


class FakeMesh:
    """Runs the gateway; use as a context manager."""

    def __init__(
        self, *, env=None, capacity=None, group=None, serve=True, spawn=True, program=(), model=None, **gateway
    ):
        self._program = program or ("-m", "edgemesh.actors.gateway")
        self._serve, self._spawns = serve, spawn
        self.run_dir = Path(tempfile.mkdtemp(prefix="em-gw-")) / "run"
        settings = {"host": "127.0.0.1", "port": 0} | gateway
        self.topology = Topology(
            mesh=MeshShape(tp=2, dp=2, attn_tp=1),
            model=Model(**({"served_name": "tiny"} | (model or {}))),
            gateway=Gateway(**settings),
            group=Group(**(group or {})),
            trace=TraceSettings(dir=str(self.run_dir.parent / "trace")),
        )
        self.tokenizer = tiny_tokenizer()
        self.vocab = self.tokenizer.get_vocab_size()
        self.capacity = capacity or Capacity(
            pages=1025,
            page_tokens=16,
            max_model_len=16384,
            vocab_size=self.vocab,
            eos_token_ids=(EOS,),
            bos_token_id=None,
            weights_bytes=0,
            kv_bytes=0,
        )
        self.url = ""
        self.submits, self.cancels, self.credits, self.faults = [], [], [], []
        self.marks = ()
        self.drained = threading.Event()
        self.most_out = {}
        self.live = {}
        self._env = {**os.environ, **(env or {})}
        self._commands, self._later, self._ready = [], [], threading.Event()
        self._over = False
        self._gateways, self._spawned = [], []
        self._turn = self._readies = 0

    # --- what tests say to it ---

    def tell(self, message, index=0):
        """A command of the supervisor's."""
        self._commands.append((f"gateway-{index}", message))

    def trace(self, event):
        """Every traced event of this name, of all gateways."""
        found = []
        for path in Path(self.topology.trace.dir).glob("gateway-*.jsonl"):
            # What follows the last end of a line is being written now.
            whole = path.read_bytes().rpartition(b"\n")[0]
            lines = [json.loads(line) for line in whole.splitlines()]
            found += [line for line in lines if line["event"] == event]
        return found

    def pid(self, index=0):
        return self._gateways[index].pid

    def accept(self, submit, group):
        """The word of a group that takes a request."""
        self._later.append((group, submit.gateway, Accepted(group, submit.gateway, 0, submit.request, 0)))

    def fail(self, submit, group):
        """The word of a group that loses a request."""
        failed = Failed(group, submit.gateway, 0, submit.request, 0, 503, "group_failed", "the group failed")
        self.live.pop(submit.request, None)
        self._later.append((group, submit.gateway, failed))

    def wait_exit(self):
        return [process.wait(PATIENCE_S) for process in self._gateways]

    # --- life ---

    def __enter__(self):
        make_run_dir(self.run_dir, self.topology)
        self.mesh = read_mesh(self.run_dir)
        model = self.run_dir / "model"
        model.mkdir()
        self.tokenizer.save(str(model / "tokenizer.json"))
        config = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>", "bos_token": None}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        trace = ListTrace()
        self._ports = {
            name: ZmqPort(self.mesh, name, 0, trace) for name in ("supervisor-0", "router-0", "group-0", "group-1")
        }
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            if self._spawns:
                for index in range(self.topology.gateway.processes):
                    self._gateways.append(self.spawn(index))
                wait_for(self._ready.is_set, "the gateways are ready")
            if self._spawns and self._serve:
                for index in range(self.topology.gateway.processes):
                    self.tell(Health(0, serving=True), index)
                wait_for(lambda: healthy(self.url), "the gateway serves")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        for index in range(len(self._gateways)):
            self.tell(Stop("the test is over"), index)
        try:
            codes = self.wait_exit()
        finally:
            self._end()
        assert codes == [0] * len(codes), (codes, self.log())

    def log(self):
        return "\n".join(path.read_text() for path in self.run_dir.parent.glob("*.log"))

    def _end(self):
        for process in self._spawned:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._over = True
        self._thread.join()
        for port in self._ports.values():
            port.close()
        shutil.rmtree(self.run_dir.parent, ignore_errors=True)

    def spawn(self, index):
        arguments = ["--run-dir", str(self.run_dir), "--name", f"gateway-{index}", "--epoch", "0"]
        log = (self.run_dir.parent / f"gateway-{index}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, *self._program, *arguments],
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._spawned.append(process)
        return process

    # --- the scripted actors, all in one thread ---

    def _run(self):
        while not self._over:
            for port in self._ports.values():
                for _, message in port.receive(0):
                    self._hear(port, message)
            while self._commands:
                self._order(*self._commands.pop(0))
            while self._later:
                self._say(*self._later.pop(0))
            self._tick()
            time.sleep(0.0005)

    def _hear(self, port, message):
        match message:
            case Hello():
                self._order(message.actor, Begin(0, self.capacity))
            case Ready():
                self.url = message.detail
                self._readies += 1
                if self._readies == self.topology.gateway.processes:
                    self._ready.set()
            case Fault():
                self.faults.append(message.reason)
            case Progress():
                self.marks = message.marks
            case Drained():
                self.drained.set()
            case Submit():
                self._place(message)
            case Cancel():
                self.cancels.append(message)
                stream = self.live.get(message.request)
                if stream is not None and stream.submit.attempt == message.attempt:
                    del self.live[message.request]
            case Credit():
                self.credits.append(message)
                if message.request in self.live:
                    self.live[message.request].credit = message.upto

    def _place(self, submit):
        self.submits.append(submit)
        script, _, argument = submit.session.partition(":")
        gateway = f"gateway-{submit.gateway}"
        if script == "reject":
            rejected = Rejected(submit.request, 0, submit.gateway, int(argument), "queue_full", "no room", 7)
            self._send("router-0", LinkKind.REJECT, rejected, gateway)
            return
        self._turn += 1
        group = self._turn % 2 if submit.pin is None else submit.pin
        if script == "lost":
            return
        self._say(group, submit.gateway, Accepted(group, submit.gateway, 0, submit.request, submit.attempt))
        if script == "fail":
            failed = Failed(group, submit.gateway, 0, submit.request, 0, 503, "group_failed", "the group failed")
            self._say(group, submit.gateway, failed)
            return
        if script in {"say", "think"}:
            self.live[submit.request] = FakeStream(submit, group, getattr(self, script))
            return
        self.live[submit.request] = FakeStream(submit, group, SCRIPTS.get(script, say_back))

    def say(self, submit):
        """What the last user's message quotes."""
        text = self.tokenizer.decode(submit.prompt.tolist(), skip_special_tokens=False)
        return self.tokenizer.encode(text.rpartition("«")[2].partition("»")[0]).ids

    def think(self, submit):
        """Thoughts without end; an answer only where they were ended for it."""
        emitted = submit.emitted.tolist()
        endless = "<think>" + "so and " * 300
        return [*emitted, *self.tokenizer.encode("yes" if emitted else endless).ids]

    def _order(self, gateway, message):
        self._send("supervisor-0", LinkKind.COMMAND, message, gateway)

    def _say(self, group, gateway, message):
        self._send(f"group-{group}", LinkKind.EMIT, message, f"gateway-{gateway}")

    def _send(self, actor, kind, message, to):
        """A gateway that is gone by now is a test's business, or nobody's."""
        with contextlib.suppress(LinkError):
            self._ports[actor].send(kind, message, to)

    def _tick(self):
        batches = {}
        for stream in list(self.live.values()):
            items = self._advance(stream)
            if items:
                batches.setdefault((stream.group, stream.submit.gateway), []).extend(items)
        for (group, gateway), items in batches.items():
            self._say(group, gateway, Emit(group, gateway, 0, tuple(items)))

    def _advance(self, stream):
        submit = stream.submit
        if submit.session == "hold":
            return []
        if stream.scored < len(submit.prompt) - 1 and submit.prompt_logprobs >= 0:
            return self._score(stream)
        step = 50 if submit.session == "flood" else 3 if submit.session == "threes" else 1
        count = min(step, stream.credit - stream.out, submit.max_tokens - stream.out, len(stream.tokens) - stream.out)
        tokens = tuple(stream.tokens[stream.out : stream.out + count])
        at = stream.out
        stream.out += count
        self.most_out[submit.request] = stream.out
        finish = Finish.NONE
        if stream.out == submit.max_tokens:
            finish = Finish.LENGTH
        elif stream.out == len(stream.tokens):
            finish = Finish.STOP
        if not tokens and finish is Finish.NONE:
            return []
        if finish is not Finish.NONE:
            self.live.pop(submit.request, None)  # a test may have failed it this moment
        wanted = submit.sampling.logprobs
        likely = -0.5 - 3 * submit.sampling.choice % 4
        logprobs = tuple(
            Logprob(token, likely, tuple(((token + k) % self.vocab, likely - k) for k in range(wanted)))
            for token in tokens
        )
        stops = submit.sampling.stop_token_ids if finish is Finish.STOP else ()
        item = Item(
            submit.request,
            submit.attempt,
            at,
            tokens,
            finish,
            logprobs if wanted >= 0 else (),
            2,
            stop_token=stops[-1] if stops else -1,
        )
        if submit.session == "twice":
            other = Item(submit.request, 7, at, (5,), Finish.NONE)
            return [other, item, item]
        return [item]

    def _score(self, stream):
        """A piece of the prompt's log-probabilities; ``unscored`` leaves out the first."""
        submit, start = stream.submit, stream.scored
        tokens = submit.prompt.tolist()
        stream.scored = stop = min(start + 3, len(tokens) - 1)
        if submit.session == "unscored" and not start:
            return []
        rows = array("i")
        for position in range(start, stop):
            value, rank, top = scored(tokens, position, submit.prompt_logprobs, self.vocab)
            rows.extend((bits(value), rank))
            for token, likely in top:
                rows.extend((token, bits(likely)))
        piece = PromptLogprobs(start, submit.prompt_logprobs, TokenArray(rows))
        return [Item(submit.request, 0, 0, (), prompt_logprobs=piece)] * (2 if submit.session == "twice" else 1)


def bits(value):
    return int.from_bytes(pack("<f", value), "little", signed=True)


def scored(tokens, position, top, vocab):
    """What this mesh says of the token after ``position``: its log-probability, its rank, and (token, log-probability) of the likeliest."""
    value = -0.25 * (position + 1)
    likely = [((tokens[position + 1] + position + place) % vocab, value / 2 - place) for place in range(top)]
    return value, position + 2, likely


def say_back(submit):
    return submit.prompt.tolist()


def endless(submit):
    return [token for token in submit.prompt.tolist() * 4096 if token > 2][: 1 << 16]


SCRIPTS = {"endless": endless, "flood": endless, "threes": say_back, "hold": endless}


def get(url, **given):
    """``httpx.get`` with patience: a busy machine may need longer than the five seconds that it allows."""
    return httpx.get(url, timeout=PATIENCE_S, **given)


def post(url, **given):
    return httpx.post(url, timeout=PATIENCE_S, **given)


def healthy(url):
    return get(url + "/health").status_code == 200


@contextlib.contextmanager
def port_for_several():
    """A port that several gateways will share, held until they do: nobody else is given it in between."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


PROMPT = "the quick brown fox jumps über 🎉 日本"


def completion(client, **given):
    return client.completions.create(**({"model": "tiny", "prompt": PROMPT, "max_tokens": 200} | given))


def connect(mesh, receive_buffer=0):
    host, port = mesh.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.settimeout(PATIENCE_S)
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.connect((host, int(port)))
    return raw


def send(raw, body, path="/v1/completions", key=""):
    data = json.dumps({"model": "tiny", "prompt": PROMPT} | body if path == "/v1/completions" else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)


def wait_for(condition, what, seconds=PATIENCE_S):
    """Poll until ``condition()`` is true; an AssertionError that says ``what`` otherwise."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    message = f"{what}: not within {seconds} s"
    raise AssertionError(message)
