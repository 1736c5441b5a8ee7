"""The group's brain: every event that reaches a group, and what it makes of it.

Events change the state; ``advance`` then commits what can run next, and ``effects`` hands over what is to be done. The
pieces: ``admission`` (who gets pages), ``planning`` (what a step runs), ``results`` (what a step changes).
"""

from collections.abc import Iterator

from edgemesh.decide.admission import make_way, parkable
from edgemesh.decide.asks import Answer
from edgemesh.decide.constraining import answer, constrain, due, expire
from edgemesh.decide.planning import pace, plan
from edgemesh.decide.request import Sequence
from edgemesh.decide.results import apply
from edgemesh.decide.state import MAX_TOMBSTONES, Config, Effects, GroupState
from edgemesh.decide.steps import Pipeline, Step
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Accepted, Cancel, Credit, Done, IdleDone, LoadReport, Place, Release


class Scheduler:
    """One group's requests, pages and steps; pure but for its own state."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = GroupState(config)

    # --- requests ---

    def place(self, place: Place, now_ns: int) -> None:
        """A request becomes this group's: queued, or refused at once with an error."""
        state, submit = self.state, place.submit
        state.placed += 1
        state.now_ns = now_ns
        key = (submit.request, submit.attempt)
        if key in state.tombstones:
            del state.tombstones[key]
            state.effects.note("request.aborted", request=submit.request)
            return
        before = state.live.get(submit.request)
        if before is not None and before.submit.attempt >= submit.attempt:
            return
        if before is not None:
            state.end(before)
        state.order += 1
        sequence = Sequence(submit, state.order, now_ns)
        if not self._welcome(sequence):
            return
        state.live[submit.request] = sequence
        state.queue.add(sequence)
        if submit.grammar and not sequence.prompt_only:
            constrain(state, sequence)
        state.effects.replies.append(
            Accepted(self.config.group, submit.gateway, self.config.epoch, submit.request, submit.attempt)
        )
        state.effects.note(
            "request.queued",
            request=submit.request,
            prompt_tokens=sequence.prompt_tokens,
            waiting=len(state.queue),
        )

    def _welcome(self, sequence: Sequence) -> bool:
        state, submit = self.state, sequence.submit
        usable = (self.config.pages - 1) * self.config.page_tokens
        if not sequence.prompt_tokens or sequence.whole > usable:
            reason = f"{sequence.prompt_tokens} prompt and {submit.max_tokens} output tokens; 1 to {usable} tokens fit"
            state.refuse(sequence, 400, "context_length_exceeded", reason)
        elif sequence.left < 0 or not (sequence.left or sequence.prompt_only):
            reason = f"{sequence.out} tokens are out already, of at most {submit.max_tokens}"
            state.refuse(sequence, 400, "nothing_left", reason)
        elif state.draining:
            state.refuse(sequence, 503, "draining", "the server is shutting down; try another one")
        elif len(state.queue) >= self.config.max_waiting:
            state.refuse(sequence, 429, "queue_full", f"{len(state.queue)} requests wait already; try again later")
        else:
            return True
        return False

    def cancel(self, cancel: Cancel) -> None:
        """A client is gone: its request ends wherever it stands, or as soon as it comes."""
        state = self.state
        sequence = state.live.get(cancel.request)
        if sequence is None or sequence.submit.attempt < cancel.attempt:
            state.tombstones[cancel.request, cancel.attempt] = None
            if len(state.tombstones) > MAX_TOMBSTONES:
                state.tombstones.popitem(last=False)
        elif sequence.submit.attempt == cancel.attempt:
            self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a request that nobody waits for any more."""
        self.state.end(sequence)
        self.state.effects.note("request.aborted", request=sequence.submit.request)

    def abort_gateway(self, gateway: int) -> list[tuple[str, int]]:
        """A gateway takes no message: its requests end. Gives back (request, attempt) of each."""
        mine = [each for each in self.state.live.values() if each.submit.gateway == gateway]
        for sequence in mine:
            self.abort(sequence)
        return [(each.submit.request, each.submit.attempt) for each in mine]

    def credit(self, credit: Credit) -> None:
        """The client reads on: a paused request may go on."""
        sequence = self.state.live.get(credit.request)
        if sequence is not None and sequence.submit.attempt == credit.attempt:
            sequence.credit = max(sequence.credit, credit.upto)
            if sequence.credited:
                self.state.resume(sequence)

    def answer(self, found: Answer, now_ns: int) -> None:
        """What a request's grammar allows next is known."""
        self.state.now_ns = now_ns
        answer(self.state, found, now_ns)

    # --- steps ---

    def release(self, release: Release, now_ns: int) -> None:
        """A tick may run: its plan, real or idle, goes to the ranks."""
        pipeline = self.state.pipelines[release.plane]
        if release.tick < pipeline.tick:
            return  # it ran already: a respawned barrier sends its last release again
        message = pipeline.release(release, now_ns)
        step = pipeline.flying[-1]
        self.state.effects.plans.append(message)
        self.state.effects.note(
            "tick.plan",
            plane=release.plane.value,
            tick=release.tick,
            tokens=step.shape.tokens,
            sequences=step.shape.sequences,
            requests=[run.sequence.submit.request for run in step.chunks],
            idle=not step.shape.tokens,
            hold=release.verdict.hold,
            **({"paced_ns": step.paced_ns, "since_ns": now_ns - step.made_ns} if step.paced_ns else {}),
        )

    def done(self, done: Done | IdleDone, now_ns: int) -> None:
        """A step's result is in."""
        state = self.state
        state.now_ns = now_ns
        step: Step = state.pipelines[done.plane].acknowledge(done, now_ns)
        state.effects.note(
            "tick.done",
            plane=done.plane.value,
            tick=done.tick,
            step_ns=done.step_ns,
            wait_ns=max(0, now_ns - step.sent_ns - done.step_ns),
        )
        if isinstance(done, Done):
            apply(state, step, done)
        state.reclaim(step.waste)

    def advance(self, now_ns: int) -> None:
        """Commit the next step of every plane that has room for one, and say what each would run."""
        if self.state.paused:
            self._expire(now_ns)
            make_way(self.state, now_ns)
        if self.state.asking:
            expire(self.state, now_ns)
        for plane, pipeline in self.state.pipelines.items():
            if plane is Plane.DECODE and self._held(pipeline, now_ns):
                continue
            if pipeline.open:
                pipeline.committed = plan(self.state, plane, now_ns)
                if pipeline.committed is not None and pipeline.held_since_ns:
                    pipeline.committed.paced_ns = now_ns - pipeline.held_since_ns
                pipeline.held_since_ns = 0
            arrive = pipeline.arrive(now_ns)
            if arrive is not None:
                self.state.effects.arrivals.append(arrive)

    def _held(self, pipeline: Pipeline, now_ns: int) -> bool:
        """Whether decode leaves the cards to prompts; these were planned before it."""
        self.state.held_until_ns = pace(self.state, now_ns)
        if self.state.held_until_ns is None:
            return False
        pipeline.held_since_ns = pipeline.held_since_ns or now_ns
        return True

    def _expire(self, now_ns: int) -> None:
        for sequence in list(self.state.paused):
            if now_ns - sequence.paused_ns >= self.config.pause_ns:
                seconds = self.config.pause_ns / 1e9
                reason = f"the client took no token for {seconds:g} s"
                self.state.fail(sequence, 408, "slow_client", reason)

    # --- what others want to know ---

    def effects(self) -> Effects:
        """What is to be done since the last call."""
        effects, self.state.effects = self.state.effects, Effects()
        return effects

    def deadline(self) -> int | None:
        """When ``advance`` must be called though nothing happens."""
        ends = [each.paused_ns + self.config.pause_ns for each in self.state.paused]
        parks = [each.paused_ns + self.config.park_ns for each in parkable(self.state)] if ends else []
        answered = due(self.state)
        turns = [each for each in (answered, self.state.held_until_ns) if each is not None]
        return min([*ends, *parks, *turns], default=None)

    @property
    def busy(self) -> bool:
        """Whether there are effects that nobody has taken yet (each leaves a note)."""
        return bool(self.state.effects.notes)

    @property
    def quiet(self) -> bool:
        """Whether no request is left and no step under way."""
        return not self.state.live and all(pipe.quiet for pipe in self.state.pipelines.values())

    def load(self, revision: int) -> LoadReport:
        """How busy the group is."""
        state = self.state
        outstanding = sum(each.ahead + each.left for each in state.live.values())
        return LoadReport(
            group=self.config.group,
            epoch=self.config.epoch,
            revision=revision,
            running=len(state.admitted),
            waiting=len(state.queue),
            outstanding_tokens=outstanding,
            free_pages=state.pages.free,
            total_pages=self.config.pages - 1,
            seen=state.placed,
            draining=state.draining,
            waiting_tokens=sum(len(each.tokens) for each in state.queue),
        )

    def check(self) -> None:
        """Prove that no page is lost or doubly held: free + held + cached is the whole pool."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """The same with pauses, in which everything must stay quiet: a large pool is long to count."""
        yield from self.state.pages.audit()
        yield from self.state.prefix.audit()
