"""Every message of the mesh, in the order in which one request meets them.

gateway --Submit--> router --Place--> group --Plan--> ranks --Done--> group --Emit--> gateway;
a group agrees on each step with its peers by ``Arrive`` and ``Release``; everyone reports to the
supervisor. ``wire.catalogue`` says which message may travel on which kind of link.

All are frozen, tagged and positional (``array_like``): small, quick, and strict in both directions.
A message about a placed request carries its ``group``; one about a step ``plane, epoch, tick``.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import (
    MAX_ALTERNATIVES,
    ActorName,
    Bytes,
    Epoch,
    Finish,
    GatewayId,
    GroupId,
    Layout,
    Nanoseconds,
    NonNegative,
    PageId,
    Phase,
    Plane,
    Position,
    RankId,
    RequestId,
    Revision,
    Slot,
    Text,
    Tick,
    TokenCount,
    TokenId,
)


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message; it never travels alone."""


class Message(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
    tag=str.lower,
):
    """What may stand alone on a link."""


# --- a request, from the client's side -----------------------------------------------------------


class Sampling(Part, frozen=True):
    """How tokens of one choice are drawn; resolved by the gateway (the seed is always set).

    ``logprobs`` is -1 for none, else how many alternatives are wanted beside the drawn token.
    ``stop_token_ids`` are banned until ``min_tokens`` have been emitted, and end the stream after.
    An empty ``allowed_token_ids`` allows all. No sequence of ``bad_words`` may come to stand in the output.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    choice: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=1024)
    ] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] = ()
    min_tokens: TokenCount = 0
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_ALTERNATIVES)] = -1
    bad_words: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)], ...], Meta(max_length=256)
    ] = ()

    @property
    def penalised(self) -> bool:
        """Whether any penalty is set."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a rank must know the tokens so far."""
        return self.penalised or any(len(word) > 1 for word in self.bad_words)


class Submit(Message, frozen=True):
    """gateway -> router: one choice of one request, not yet placed.

    ``emitted`` are tokens that the client already has, when the gateway re-submits (``attempt`` > 0);
    ``max_tokens`` counts them. ``key`` is the fairness key, ``session`` the affinity key ("" for none), ``pin`` the group
    that the client asked for. ``credit`` is how many tokens may be emitted before a ``Credit`` raises it. Cached prompts are shared
    only among requests of one ``tenant``: how long a prompt takes must not tell one of them what another asked.
    ``grammar`` is the source of what the output must be ("" for anything), as ``edgemesh.grammar`` takes it.

    ``max_tokens`` 0 asks for the prompt alone: the request ends when that is computed. ``prompt_logprobs`` is -1 for none, else how many
    alternatives are wanted beside each prompt token; the gateway has those of the first ``scored`` positions already.
    """

    request: RequestId
    attempt: NonNegative
    gateway: GatewayId
    prompt: TokenArray
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    emitted: TokenArray = msgspec.field(default_factory=TokenArray)
    key: Annotated[str, Meta(max_length=160)] = ""
    session: Annotated[str, Meta(max_length=160)] = ""
    pin: GroupId | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    credit: Annotated[int, Meta(ge=1)] = 1 << 20
    tenant: Annotated[str, Meta(max_length=160)] = ""
    grammar: Annotated[str, Meta(max_length=1 << 20)] = ""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_ALTERNATIVES)] = -1
    scored: TokenCount = 0


class Rejected(Message, frozen=True):
    """router -> gateway: no group takes this request now."""

    request: RequestId
    attempt: NonNegative
    gateway: GatewayId
    status: Annotated[int, Meta(ge=400, le=599)]
    code: Text
    reason: Text
    retry_after_s: NonNegative = 0


class Place(Message, frozen=True):
    """router -> group: the request is this group's from now on."""

    group: GroupId
    submit: Submit


class Cancel(Message, frozen=True):
    """gateway -> the group of a placed request: the client is gone, or has enough."""

    group: GroupId
    request: RequestId
    attempt: NonNegative


class Credit(Message, frozen=True):
    """gateway -> the group of a placed request: tokens up to index ``upto`` may be emitted."""

    group: GroupId
    request: RequestId
    attempt: NonNegative
    upto: NonNegative


class Accepted(Message, frozen=True):
    """group -> gateway: where the request lives (a Cancel goes there)."""

    group: GroupId
    gateway: GatewayId
    epoch: Epoch
    request: RequestId
    attempt: NonNegative


class Logprob(Part, frozen=True):
    """Natural-log probability of the drawn token, and of the likeliest ones, best first."""

    token: TokenId
    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()


class PromptLogprobs(Part, frozen=True):
    """How likely each prompt token after the positions ``start ...`` was, and the likeliest ones there.

    ``rows`` holds 2 + 2 * ``top`` numbers for each position: the natural-log probability of the token that follows it (a float32's
    bits), that token's rank (from 1), then id and log-probability of the ``top`` likeliest, best first.
    """

    start: Position
    top: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
    rows: TokenArray

    @property
    def width(self) -> int:
        """Numbers of one position."""
        return 2 + 2 * self.top

    @property
    def count(self) -> int:
        """Positions."""
        return len(self.rows) // self.width


class Item(Part, frozen=True):
    """Tokens of one stream, the first of them its ``index``-th (from 0, ``emitted`` included).

    ``cached_tokens`` is how much of the prompt was found in the prefix cache. ``prompt_logprobs`` come in pieces, in the order of the
    prompt's positions, and all of them before the first token. ``stop_token`` ended the stream (-1: none did), and is not among the
    tokens.
    """

    request: RequestId
    attempt: NonNegative
    index: NonNegative
    tokens: tuple[TokenId, ...]
    finish: Finish = Finish.NONE
    logprobs: tuple[Logprob, ...] = ()
    cached_tokens: TokenCount = 0
    prompt_logprobs: PromptLogprobs | None = None
    stop_token: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1


class Emit(Message, frozen=True):
    """group -> gateway: what one tick gave to the streams of that gateway."""

    group: GroupId
    gateway: GatewayId
    epoch: Epoch
    items: tuple[Item, ...]


class Failed(Message, frozen=True):
    """group -> gateway: the request ends with an error."""

    group: GroupId
    gateway: GatewayId
    epoch: Epoch
    request: RequestId
    attempt: NonNegative
    status: Annotated[int, Meta(ge=400, le=599)]
    code: Text
    reason: Text


class LoadReport(Message, frozen=True):
    """group -> router: how busy the group is; a higher ``revision`` replaces a lower one.

    ``outstanding_tokens``: prompt tokens not yet computed plus tokens that may still be generated. ``waiting_tokens``: prompt
    tokens of the requests that wait.
    ``seen``: placements that the group had received when it wrote this.
    """

    group: GroupId
    epoch: Epoch
    revision: Revision
    running: NonNegative
    waiting: NonNegative
    outstanding_tokens: NonNegative
    free_pages: NonNegative
    total_pages: NonNegative
    seen: NonNegative
    draining: bool = False
    waiting_tokens: NonNegative = 0


# --- a step: the barrier ---------------------------------------------------------------------------


class Shape(Part, frozen=True):
    """What a group would run in a tick; no tokens means idle."""

    tokens: TokenCount = 0
    sequences: NonNegative = 0
    longest: TokenCount = 0
    graph: bool = False


class Arrive(Message, frozen=True):
    """group -> barrier: the plan for this tick is made; a higher revision replaces it until release."""

    plane: Plane
    epoch: Epoch
    tick: Tick
    group: GroupId
    revision: Revision
    shape: Shape


class Verdict(Part, frozen=True):
    """The only source of every choice on which ranks could diverge.

    ``tokens[i]`` belongs to the i-th group of the coupled set (0: it is idle); ``bucket`` is the padded number of
    tokens per group in the even layout (0 in the ragged one).
    """

    tokens: tuple[TokenCount, ...]
    layout: Layout
    bucket: TokenCount
    graph: bool = False
    hold: Text = ""


class Release(Message, frozen=True):
    """barrier -> each group of the coupled set: run this tick, exactly so."""

    plane: Plane
    epoch: Epoch
    tick: Tick
    verdict: Verdict


class Resume(Message, frozen=True):
    """group -> a respawned barrier: my open arrival and the last release I saw, verbatim."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    arrive: Arrive | None
    release: Release | None


# --- a step: plans and results -----------------------------------------------------------------------


class Scoring(Part, frozen=True):
    """Positions ``first ...`` of a chunk, each asked for the log-probability of the prompt token after it, ``targets`` in order.

    The last target may belong to the next chunk. ``top`` is how many alternatives are wanted beside each.
    """

    first: Position
    top: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
    targets: TokenArray


class Chunk(Part, frozen=True):
    """A run of one request's prompt tokens, computed in this step.

    Positions ``start .. start + length - 1``; ``pages`` is the block table up to the last of them. A ``final``
    chunk samples one token from its last position, with ``sampling`` and, if that needs it,
    ``history`` (all tokens so far). ``emitted`` is how many tokens the stream has already. ``scoring`` asks for log-probabilities of
    the prompt.
    """

    request: RequestId
    start: Position
    length: Annotated[int, Meta(ge=1)]
    pages: tuple[PageId, ...]
    final: bool = False
    sampling: Sampling | None = None
    emitted: TokenCount = 0
    history: TokenArray = msgspec.field(default_factory=TokenArray)
    scoring: Scoring | None = None


class Prefill(Part, frozen=True):
    """Chunks packed into one step; ``tokens`` are theirs, one after the other.

    ``masked`` are the places, among ``chunks``, of final ones whose token a grammar restricts; ``masks`` as in ``Decode``.
    """

    chunks: tuple[Chunk, ...]
    tokens: TokenArray
    masked: tuple[NonNegative, ...] = ()
    masks: TokenArray = msgspec.field(default_factory=TokenArray)


class Join(Part, frozen=True):
    """A row enters the persistent decode batch.

    ``token`` stands at ``position`` and its KV is not written yet: the row's next step writes it and draws the next.
    ``emitted`` counts the stream's tokens so far, ``token`` included.
    """

    slot: Slot
    request: RequestId
    token: TokenId
    position: Position
    pages: tuple[PageId, ...]
    sampling: Sampling
    emitted: TokenCount
    history: TokenArray = msgspec.field(default_factory=TokenArray)


class Grow(Part, frozen=True):
    """A row gets more pages, appended to its block table."""

    slot: Slot
    pages: tuple[PageId, ...]


class Decode(Part, frozen=True):
    """One decode step as a delta: leave, then join and grow; then every row but ``sits`` runs.

    ``masked`` are slots that run and whose token a grammar restricts; ``masks`` has a row for each: a bit per token id, set where it is
    allowed, in 32-bit words from the lowest bit on.
    """

    leaves: tuple[Slot, ...] = ()
    joins: tuple[Join, ...] = ()
    grows: tuple[Grow, ...] = ()
    sits: tuple[Slot, ...] = ()
    masked: tuple[Slot, ...] = ()
    masks: TokenArray = msgspec.field(default_factory=TokenArray)


class Plan(Message, frozen=True):
    """group -> its ranks of one plane: a real step."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    tick: Tick
    verdict: Verdict
    prefill: Prefill | None = None
    decode: Decode | None = None


class IdlePlan(Message, frozen=True):
    """group -> its ranks of one plane: join every collective of this step, with nothing."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    tick: Tick
    verdict: Verdict


class Attached(Message, frozen=True):
    """rank -> group: ready for plans of this epoch, from tick 0."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    rank: RankId


class Done(Message, frozen=True):
    """The group's leading rank -> group: a plan is executed.

    It speaks for all ranks of the group: its last collective had every rank's part, which each gave
    after its last access to the KV pages of that plan. ``slots[i]`` drew ``tokens[i]``; ``firsts`` belong to the final chunks in
    order. A token of -1 means none was accepted this time: the row draws again in its next step. ``prompt_logprobs`` answer the
    chunks with ``scoring``, in order.
    """

    group: GroupId
    plane: Plane
    epoch: Epoch
    tick: Tick
    slots: tuple[Slot, ...] = ()
    tokens: tuple[Annotated[int, Meta(ge=-1, lt=1 << 31)], ...] = ()
    firsts: tuple[Annotated[int, Meta(ge=-1, lt=1 << 31)], ...] = ()
    logprobs: tuple[Logprob | None, ...] = ()
    first_logprobs: tuple[Logprob | None, ...] = ()
    step_ns: Nanoseconds = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class IdleDone(Message, frozen=True):
    """The group's leading rank -> group: an idle plan is executed; it has no field for a token."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    tick: Tick
    step_ns: Nanoseconds = 0


class StepFault(Message, frozen=True):
    """rank -> group: a plan was refused before it touched a collective, or failed in it."""

    group: GroupId
    plane: Plane
    epoch: Epoch
    tick: Tick
    rank: RankId
    reason: Text


# --- life and health -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """actor -> supervisor: the process runs."""

    actor: ActorName
    epoch: Epoch
    pid: NonNegative


class Loading(Message, frozen=True):
    """vault -> supervisor: how far the weights are."""

    actor: ActorName
    epoch: Epoch
    step: Text
    done_bytes: Bytes
    total_bytes: Bytes


class Ready(Message, frozen=True):
    """actor -> supervisor: its part of the start is over."""

    actor: ActorName
    epoch: Epoch
    detail: Text = ""


class Capacity(Part, frozen=True):
    """What the vault found and made, for those who plan by it.

    ``pages`` counts page 0, the scratch page; ``max_model_len`` is the longest prompt plus output, in tokens.
    """

    pages: Annotated[int, Meta(ge=2, le=1 << 24)]
    page_tokens: Annotated[int, Meta(ge=1, le=4096)]
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 20)]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    eos_token_ids: tuple[TokenId, ...]
    bos_token_id: TokenId | None
    weights_bytes: Bytes
    kv_bytes: Bytes


class VaultReady(Message, frozen=True):
    """vault -> supervisor: weights and KV slabs are in place; ``budget`` says in words where a card's memory goes."""

    actor: ActorName
    epoch: Epoch
    capacity: Capacity
    budget: Text = ""


class Mark(Part, frozen=True):
    """Where an actor stands in one plane, since when (monotonic), and how long that may take."""

    plane: Plane
    tick: Tick
    phase: Phase
    since_ns: Nanoseconds
    bound_ns: Nanoseconds


class Progress(Message, frozen=True):
    """actor -> supervisor, a few times a second from a thread of its own: I am alive, and here."""

    actor: ActorName
    epoch: Epoch
    marks: tuple[Mark, ...]


class Fault(Message, frozen=True):
    """actor -> supervisor: I cannot go on."""

    actor: ActorName
    epoch: Epoch
    reason: Text


class Begin(Message, frozen=True):
    """supervisor -> actor: the epoch starts; plan by this capacity."""

    epoch: Epoch
    capacity: Capacity


class Health(Message, frozen=True):
    """supervisor -> gateways and router: whether requests may come, and if not, why."""

    epoch: Epoch
    serving: bool
    draining: bool = False
    reason: Text = ""


class Drain(Message, frozen=True):
    """supervisor -> actor: nothing new; finish what runs, within the deadline."""

    deadline_ns: Nanoseconds


class Stop(Message, frozen=True):
    """supervisor -> actor: end now."""

    reason: Text


class Drained(Message, frozen=True):
    """group or gateway -> supervisor: nothing is left to finish."""

    actor: ActorName
    epoch: Epoch


# --- memory ---------------------------------------------------------------------------------------------


class Lease(Message, frozen=True):
    """rank -> vault: which rank and plane asks for its memory."""

    actor: ActorName
    epoch: Epoch
    rank: RankId
    plane: Plane


class TensorPlace(Part, frozen=True):
    """Where one tensor of a rank lies: in the ``region``-th descriptor, from byte ``offset``."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[NonNegative, ...], Meta(max_length=8)]
    region: Annotated[int, Meta(ge=0, lt=256)]
    offset: Bytes


class CardMemory(Part, frozen=True):
    """On which card a grant's regions lie: the ``handles[i]`` that the CUDA driver gave out opens the i-th region.

    ``device`` is the card's number among those that the vault sees and ``uuid`` the card's own name; ``torch`` is the
    vault's version. A rank for which any of the three is another must not open the handles.
    """

    device: RankId
    uuid: Annotated[str, Meta(min_length=1, max_length=64)]
    torch: Annotated[str, Meta(min_length=1, max_length=64)]
    handles: Annotated[tuple[Annotated[bytes, Meta(min_length=64, max_length=64)], ...], Meta(max_length=256)]


class Grant(Message, frozen=True):
    """vault -> rank: the model's shape and every tensor.

    The regions are descriptors that come by SCM_RIGHTS, or, with ``card``, memory of that card and no descriptor.
    ``shape`` is the engine's own frozen struct as JSON (the wire layer does not know the engine).
    """

    rank: RankId
    epoch: Epoch
    capacity: Capacity
    shape: Annotated[bytes, Meta(max_length=1 << 16)]
    region_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=256)]
    tensors: Annotated[tuple[TensorPlace, ...], Meta(max_length=1 << 16)]
    card: CardMemory | None = None
