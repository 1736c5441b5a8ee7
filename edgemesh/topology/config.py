"""The topology file as frozen structs: every section, every key, its bounds, its default and what it means.

The description of a key is what ``edgemesh topology schema`` prints and what an error about it quotes.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from edgemesh.wire.ids import MAX_PAGES, MAX_RANKS, MAX_TOKENS, Plane

MAX_CHUNK_TOKENS: Final = MAX_TOKENS // 2
MAX_SLOTS: Final = 1 << 16
"""A step of both planes' work together, padded to a multiple of any number of ranks, stays within ``MAX_TOKENS``."""

Port = Annotated[int, Meta(ge=1, le=65535)]
Percent = Annotated[int, Meta(ge=1, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""


class MeshShape(Section, frozen=True):
    """``[mesh]``: the three numbers, whether planes are split, and the machines."""

    name: Annotated[
        str,
        Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,47}\Z", description="What logs and the run directory call this mesh."),
    ] = "edgemesh"
    tp: Annotated[int, Meta(ge=1, le=MAX_RANKS, description="Ranks that share each MLP.")] = 1
    dp: Annotated[
        int,
        Meta(ge=1, le=MAX_RANKS, description="Attention groups; a request lives in exactly one, with its KV cache."),
    ] = 1
    attn_tp: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_RANKS,
            description="Ranks per group, over which attention is sharded. Left out (or 0): tp / dp. Equal to tp: plain DP.",
        ),
    ] = 0
    split: Annotated[
        bool,
        Meta(description="A prefill and a decode process per GPU over one KV cache (true), or one process for both."),
    ] = True
    hosts: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...],
        Meta(
            min_length=1,
            max_length=MAX_RANKS,
            description="Addresses of the machines, in order. With as many groups as hosts or more, whole groups are dealt"
            " out evenly in order; with fewer, ranks are, and then a group spans hosts.",
        ),
    ] = ("127.0.0.1",)
    base_port: Annotated[
        int,
        Meta(ge=1024, le=65535, description="First TCP port of the links between hosts (unused on one host)."),
    ] = 7700
    keys_dir: Annotated[
        str,
        Meta(max_length=4096, description="Directory of the CURVE keys of the hosts; needed with several hosts only."),
    ] = ""


class Model(Section, frozen=True):
    """``[model]``: what is served."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="A pulled model's name, a Hugging Face directory or hub id, or a GGUF file.",
        ),
    ] = "smollm2-135m"
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Type of weights, activations and KV cache.")] = (
        "bfloat16"
    )
    weights: Annotated[
        Literal["file", "random"],
        Meta(
            description="file: trained weights. random: noise in a model of this config's shape, to measure with; it needs no weight files."
        ),
    ] = "file"
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Longest prompt plus output, in tokens. 0: the model's own, if the KV holds it.",
        ),
    ] = 0
    served_name: Annotated[
        str, Meta(max_length=256, description="The model's name in the API. Empty: the last part of the path.")
    ] = ""
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama", "qwen3_coder", "none"],
        Meta(
            description="How the model writes calls of tools. hermes: JSON in <tool_call> tags. llama: JSON alone, or behind"
            " <|python_tag|>. qwen3_coder: a tag for each argument. auto: as its chat template asks for; where that knows no tools, the server describes them, in hermes'"
            " form. none: tools are refused."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        Meta(
            description="How the model writes its reasoning. think: in <think> tags, before the answer. auto: so if its chat"
            " template names them. none: it is part of the answer."
        ),
    ] = "auto"


class Engine(Section, frozen=True):
    """``[engine]``: how ranks compute."""

    device: Annotated[Literal["cpu", "cuda"], Meta(description="Where the ranks run.")] = "cpu"
    kind: Annotated[
        Literal["model", "null"],
        Meta(description="model: the network. null: ranks that answer at once, to size gateways and groups."),
    ] = "model"
    collectives: Annotated[
        Literal["auto", "shm", "gloo", "nccl"],
        Meta(description="How ranks exchange tensors. auto: nccl on CUDA, shared memory on one CPU host, else gloo."),
    ] = "auto"
    exchange: Annotated[
        Literal["scatter", "reduce"],
        Meta(
            description="How attention DP moves rows between attention and MLP. scatter: reduce-scatter and all-gather."
            " reduce: all-reduce alone, which moves more and is there to be measured."
        ),
    ] = "scatter"
    attention: Annotated[
        Literal["auto", "torch", "flash-attn"],
        Meta(
            description="Attention kernels. auto: on CUDA flash-attn where it is installed, and own Triton kernels where it is not or where they"
            " were measured to be faster (on Hopper); torch on CPU. On CUDA torch means the own kernels."
        ),
    ] = "auto"
    mps: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Both planes at once on each card (CUDA, split). auto: if NVIDIA's MPS is installed; several ranks need it."
            " on: or do not start. off: the planes take turns, also with several ranks."
        ),
    ] = "auto"
    threads: Annotated[int, Meta(ge=1, le=256, description="CPU threads of each rank process.")] = 1
    page_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Tokens per KV page; on CUDA a multiple of 256. Left out (or 0): 256 on CUDA, 16 on CPU.",
        ),
    ] = 0
    kv_pages: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_PAGES,
            description="KV pages of each group, the scratch page included. 0: as many as memory_fraction allows.",
        ),
    ] = 0
    memory_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of a card (on CPU: of the free memory) for weights and KV when kv_pages is 0.",
        ),
    ] = 0.9
    min_full_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Full-length requests that the KV of each group must hold, for topology check to accept a card.",
        ),
    ] = 2


class Prefill(Section, frozen=True):
    """``[prefill]``: the plane that reads prompts."""

    chunk_tokens: Annotated[
        int, Meta(ge=1, le=MAX_CHUNK_TOKENS, description="Most prompt tokens of one group in one prefill step.")
    ] = 2048
    sm_percent: Annotated[
        Percent, Meta(description="Share of a GPU's SMs for prefill (CUDA, split): lower keeps decode steadier.")
    ] = 100


class Decode(Section, frozen=True):
    """``[decode]``: the plane that writes answers."""

    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS, description="Most sequences of one group in one decode step.")] = 64
    sm_percent: Annotated[Percent, Meta(description="Share of a GPU's SMs for decode (CUDA, split).")] = 100
    pace_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="Time from one decode step's end to the next one's while 4 full chunks of prompts or more wait beside them (split), less"
            " while fewer do; the cards are the prompts' in between. A group that holds its step holds those of its coupled set. 0: nothing is held.",
        ),
    ] = 0


class Group(Section, frozen=True):
    """``[group]``: admission and KV pages of each group."""

    max_waiting: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Requests that may wait in one group; beyond it clients get 429.")
    ] = 1024
    max_waiting_tokens: Annotated[
        int, Meta(ge=1, le=1 << 32, description="Prompt tokens that may wait in one group; beyond it clients get 429.")
    ] = 4 << 20
    prefix_cache: Annotated[
        bool, Meta(description="Keep the pages of finished prompts for others that begin alike.")
    ] = True
    reserve_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MAX_TOKENS, description="Room to grow, in tokens per running request, that admission leaves free."
        ),
    ] = 64
    age_s: Annotated[Seconds, Meta(description="A request that waited this long is next, whatever its priority.")] = (
        10.0
    )
    credit_deadline_s: Annotated[
        Seconds,
        Meta(description="How long a request may pause for a client that does not read, before it is cancelled."),
    ] = 60.0


class Router(Section, frozen=True):
    """``[router]``: which group gets a request."""

    policy: Annotated[
        Literal["prefix", "round_robin", "least_tokens"],
        Meta(description="prefix: the group that knows the prompt's beginning, unless it is overloaded."),
    ] = "prefix"
    load_bound: Annotated[
        float,
        Meta(
            ge=1,
            le=1000,
            description="A group is overloaded that is above the least busy one by (this - 1) times the groups' mean, beyond what its prefix saves.",
        ),
    ] = 1.25


class Barrier(Section, frozen=True):
    """``[barrier]``: how the groups of one coupled set step together."""

    hold_ms: Annotated[
        float,
        Meta(ge=0, le=10_000, description="How long a prefill tick may wait for groups to join it. 0: not at all."),
    ] = 0.0


class Gateway(Section, frozen=True):
    """``[gateway]``: the HTTP side."""

    host: Annotated[str, Meta(min_length=1, max_length=253, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on. 0: any free one.")] = 8000
    processes: Annotated[int, Meta(ge=1, le=256, description="Gateway processes that share the port.")] = 1
    api_keys_file: Annotated[
        str,
        Meta(
            max_length=4096,
            description="File with one API key a line, plain or as edgemesh api key prints it; read again when it changes."
            " Empty: no key is asked for.",
        ),
    ] = ""
    allowed_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"\A(\*|[a-z][a-z0-9+.-]{0,30}://[^/\s,]{1,253})\Z")], ...],
        Meta(
            max_length=64,
            description="Origins (https://host[:port], or * for all) whose pages' scripts may call. Empty: none.",
        ),
    ] = ()
    key_max_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Requests that one API key may have open; beyond it clients get 429. 0: any number. A key's own line"
            " in the file may say otherwise; where no keys are asked for, this holds for all clients together.",
        ),
    ] = 0
    key_requests_per_minute: Annotated[
        int, Meta(ge=0, le=1 << 40, description="Requests that one API key may make a minute, likewise.")
    ] = 0
    key_tokens_per_minute: Annotated[
        int,
        Meta(ge=0, le=1 << 40, description="Tokens of prompts and output that one API key may use a minute, likewise."),
    ] = 0
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Largest request body; beyond it clients get 413.")
    ] = 16 << 20
    max_streams: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Choices that one gateway may have open; beyond it clients get 429.")
    ] = 4096
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Connections of one gateway; beyond it the longest idle one is closed, or the new one gets 503.",
        ),
    ] = 8192
    head_timeout_s: Annotated[
        Seconds, Meta(description="How long a request line and its headers may take; then clients get 408.")
    ] = 30.0
    body_timeout_s: Annotated[Seconds, Meta(description="How long a body may take; then clients get 408.")] = 60.0
    keep_alive_s: Annotated[
        Seconds, Meta(description="How long a connection may be idle between two requests before it is closed.")
    ] = 75.0
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="How long a request may take from its arrival to its end; then it is cancelled, and its client gets"
            " 504, or an error event where the stream has begun. 0: as long as it needs.",
        ),
    ] = 0.0


class Supervisor(Section, frozen=True):
    """``[supervisor]``: deadlines of the life cycle."""

    start_deadline_s: Annotated[
        Seconds, Meta(description="Longest start before the late actor is named and all ends.")
    ] = 600.0
    step_bound_s: Annotated[Seconds, Meta(description="Longest step before its rank counts as hung.")] = 60.0
    silence_s: Annotated[
        Seconds, Meta(description="Longest silence of an actor's reports before it counts as dead.")
    ] = 3.0
    report_ms: Annotated[int, Meta(ge=10, le=10_000, description="How often an actor reports its progress.")] = 250
    drain_s: Annotated[Seconds, Meta(description="How long running requests may go on after SIGTERM.")] = 30.0


class Trace(Section, frozen=True):
    """``[trace]``: what is written about every request and step."""

    dir: Annotated[str, Meta(max_length=4096, description="Where traces go. Empty: the run directory.")] = ""
    level: Annotated[Literal["off", "info", "debug"], Meta(description="How much is traced.")] = "info"
    max_bytes: Annotated[
        int, Meta(ge=1 << 16, le=1 << 40, description="Size at which an actor's trace file is rotated.")
    ] = 64 << 20
    files: Annotated[int, Meta(ge=1, le=1000, description="Rotated files kept per actor, beside the open one.")] = 3


class Topology(Section, frozen=True):
    """The whole file; every section and key may be left out."""

    mesh: MeshShape = MeshShape()
    model: Model = Model()
    engine: Engine = Engine()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    group: Group = Group()
    router: Router = Router()
    barrier: Barrier = Barrier()
    gateway: Gateway = Gateway()
    supervisor: Supervisor = Supervisor()
    trace: Trace = Trace()

    @property
    def attn_tp(self) -> int:
        """Ranks per group."""
        return self.mesh.attn_tp or self.mesh.tp // self.mesh.dp

    @property
    def world(self) -> int:
        """Ranks per plane, over all groups."""
        return self.mesh.dp * self.attn_tp

    @property
    def coupled(self) -> bool:
        """Whether several groups step together (attention DP)."""
        return self.mesh.dp > 1 and self.mesh.tp == self.world

    @property
    def mode(self) -> str:
        """The mode's name: ``plain TP``, ``attention DP`` or ``plain DP``."""
        if self.mesh.dp == 1:
            return "plain TP"
        return "attention DP" if self.coupled else "plain DP"

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that every rank number has a process for."""
        return (Plane.PREFILL, Plane.DECODE) if self.mesh.split else (Plane.MIXED,)
