"""Which group gets a request: a policy over load reports, and the router's own count of what they do not show yet.

A group reports its load a hundred times a second at most, so a burst would go to whoever was idle in the last report. The
router therefore adds what it has placed since: each report says how many placements it has ``seen``.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal

from edgemesh.decide.prefix import KEY_BYTES, chain, root_of
from edgemesh.wire.messages import LoadReport, Rejected, Submit

Policy = Literal["prefix", "round_robin", "least_tokens"]

MAX_DEPTH: Final = 64
"""Pages of a prompt's beginning that the router tells apart."""

MAX_REMEMBERED: Final = 1 << 16
"""Prefix pages and sessions that the router remembers; the longest unused is forgotten first."""

MAX_RETRY_S: Final = 30


@dataclass(frozen=True, slots=True)
class Config:
    """What placement follows; the limits are for each group's queue.

    ``bound``: a group is overloaded when it is above the least busy one by more than ``bound - 1`` times the mean, beyond
    what its known prefix saves.
    """

    groups: int
    policy: Policy
    bound: float
    max_waiting: int
    max_waiting_tokens: int
    page_tokens: int


@dataclass(slots=True)
class GroupLoad:
    """One group as the router sees it.

    ``unseen`` are the placements that ``report`` does not count: all tokens of each, and those of its prompt.
    """

    report: LoadReport | None = None
    first_seen: int = 0
    placed: int = 0
    unseen: deque[tuple[int, int]] = field(default_factory=deque)
    unseen_tokens: int = 0
    unseen_prompts: int = 0

    @property
    def open(self) -> bool:
        """Whether it may be given requests."""
        return self.report is not None and not self.report.draining

    @property
    def waiting(self) -> int:
        """Requests that may have to wait there."""
        return len(self.unseen) + (self.report.waiting if self.report else 0)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to be computed there."""
        return self.unseen_tokens + (self.report.outstanding_tokens if self.report else 0)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that may have to wait there."""
        return self.unseen_prompts + (self.report.waiting_tokens if self.report else 0)

    def update(self, report: LoadReport) -> None:
        """Take a report; an older one than the last changes nothing, one of a new epoch starts anew."""
        last = self.report
        if last is None or report.epoch > last.epoch:
            self.first_seen, self.placed, self.unseen_tokens, self.unseen_prompts = report.seen, 0, 0, 0
            self.unseen.clear()
        elif report.epoch < last.epoch or report.revision <= last.revision:
            return
        self.report = report
        while self.unseen and self.placed - len(self.unseen) < report.seen - self.first_seen:
            tokens, prompt = self.unseen.popleft()
            self.unseen_tokens -= tokens
            self.unseen_prompts -= prompt

    def place(self, submit: Submit) -> None:
        """Count a placement until a report does."""
        self.placed += 1
        self.unseen.append((cost(submit), _prompt(submit)))
        self.unseen_tokens += cost(submit)
        self.unseen_prompts += _prompt(submit)


@dataclass(frozen=True, slots=True)
class Choice:
    """The group of a request, and ``why``; ``keys`` are its prefix and session, to be remembered once it is placed."""

    group: int
    why: str
    keys: tuple[bytes, ...] = ()


class RouterState:
    """What the router knows of each group, and which group knows which beginnings of prompts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loads = [GroupLoad() for _ in range(config.groups)]
        self.turn = 0
        self.memory: OrderedDict[bytes, int] = OrderedDict()

    def report(self, report: LoadReport) -> None:
        """A group says how busy it is."""
        if report.group < self.config.groups:
            self.loads[report.group].update(report)

    def choose(self, submit: Submit) -> Choice | Rejected:
        """Where this request should go; nothing is changed until ``place``."""
        if submit.pin is not None:
            return self._pinned(submit, submit.pin)
        alive = [group for group, load in enumerate(self.loads) if load.open]
        if not alive:
            return refusal(submit, 503, "no_group", "no group takes requests now; try again later", 1)
        fit = [group for group in alive if not self._full(group, submit)]
        if not fit:
            least = min(alive, key=lambda group: self.loads[group].waiting)
            return self._crowded(submit, least, f"all {len(alive)} groups' queues are full")
        if self.config.policy == "round_robin":
            return Choice(self._next(fit), "next in turn")
        if self.config.policy == "least_tokens":
            return self._least(fit)
        return self._sticky(submit, alive, fit)

    def place(self, submit: Submit, choice: Choice) -> None:
        """The request was sent to its group: count it, and remember its beginning there."""
        self.loads[choice.group].place(submit)
        self.turn = (choice.group + 1) % self.config.groups
        for key in choice.keys:
            session = len(key) > KEY_BYTES
            self.memory[key] = (0 if session else self.memory.get(key, 0)) | 1 << choice.group
            self.memory.move_to_end(key)
        while len(self.memory) > MAX_REMEMBERED:
            self.memory.popitem(last=False)

    # --- policies ---

    def _pinned(self, submit: Submit, pin: int) -> Choice | Rejected:
        if pin >= self.config.groups:
            legal = "the only group is 0" if self.config.groups == 1 else f"groups are 0 to {self.config.groups - 1}"
            return refusal(submit, 400, "invalid_group", f"there is no group {pin}; {legal}")
        if not self.loads[pin].open:
            return refusal(submit, 503, "no_group", f"group {pin} takes no requests now; try again later", 1)
        if self._full(pin, submit):
            return self._crowded(submit, pin, f"the queue of group {pin} is full")
        return Choice(pin, "pinned by the client")

    def _next(self, fit: Sequence[int]) -> int:
        return min(fit, key=lambda group: (group - self.turn) % self.config.groups)

    def _least(self, fit: Sequence[int], but: str = "") -> Choice:
        def burden(group: int) -> tuple[int, int, int]:
            load = self.loads[group]
            return load.outstanding_tokens, load.waiting, (group - self.turn) % self.config.groups

        group = min(fit, key=burden)
        return Choice(group, f"{but}least outstanding tokens ({self.loads[group].outstanding_tokens})")

    def _sticky(self, submit: Submit, alive: Sequence[int], fit: Sequence[int]) -> Choice:
        """The group that knows the session or the longest beginning, unless waiting there costs more than it saves."""
        tokens = len(submit.prompt)
        depth = min(MAX_DEPTH, (tokens - 1) // self.config.page_tokens)
        root = root_of(submit.tenant)
        keys = chain(submit.prompt.buffer, self.config.page_tokens, depth, root)
        session = (
            b"session:" + blake2b(submit.session.encode(), digest_size=KEY_BYTES, key=root).digest()
            if submit.session
            else b""
        )
        remembered = (session, *keys) if session else tuple(keys)
        knowing, saved, what = self._knowing(session, keys, tokens)
        candidates = [group for group in fit if knowing >> group & 1]
        but = ""
        if candidates:
            group = self._least(candidates).group
            busy, *others = (self.loads[each].outstanding_tokens for each in (group, *alive))
            limit = min(others) + (self.config.bound - 1) * sum(others) / len(others) + saved
            if busy <= limit:
                return Choice(group, what, remembered)
            but = f"group {group} knows the {what} but is overloaded ({busy} tokens, limit {limit:.0f}); "
        chosen = self._least(fit, but)
        return Choice(chosen.group, chosen.why, remembered)

    def _knowing(self, session: bytes, keys: Sequence[bytes], tokens: int) -> tuple[int, int, str]:
        """(bit mask of groups, prompt tokens that they need not compute, what they know)."""
        if session in self.memory:
            return self.memory[session], tokens, "session"
        for depth in range(len(keys), 0, -1):
            mask = self.memory.get(keys[depth - 1])
            if mask:
                saved = depth * self.config.page_tokens
                return mask, saved, f"prefix of {saved} tokens"
        return 0, 0, ""

    # --- limits ---

    def _full(self, group: int, submit: Submit) -> bool:
        load, config = self.loads[group], self.config
        if load.waiting >= config.max_waiting:
            return True
        return load.waiting > 0 and load.waiting_tokens + _prompt(submit) > config.max_waiting_tokens

    def _crowded(self, submit: Submit, group: int, reason: str) -> Rejected:
        load = self.loads[group]
        running = max(1, load.report.running if load.report else 0)
        retry_s = min(MAX_RETRY_S, 1 + load.waiting // running)
        return refusal(submit, 429, "queue_full", f"{reason}; try again in {retry_s} s", retry_s)


def cost(submit: Submit) -> int:
    """Tokens that a request will have computed at most: its prompt's and those it may still generate."""
    return len(submit.prompt) + submit.max_tokens


def _prompt(submit: Submit) -> int:
    """Tokens that must be read before the next one is generated."""
    return len(submit.prompt) + len(submit.emitted)


def refusal(submit: Submit, status: int, code: str, reason: str, retry_after_s: int = 0) -> Rejected:
    """The answer to a request that no group gets."""
    return Rejected(submit.request, submit.attempt, submit.gateway, status, code, reason, retry_after_s)
