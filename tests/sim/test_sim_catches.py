"""The simulator itself: each fault that is put in on purpose must be found, and told with the seed."""

from players import ask
from simulation import Simulation, SimulationError
from worlds import world

from edgemesh.actors.barrier import BarrierActor
from edgemesh.decide import admission, barrier, results, scoring
from edgemesh.decide.pages import Pages
from edgemesh.decide.prefix import Prefix
from edgemesh.decide.state import GroupState
from edgemesh.decide.steps import IDLE, Pipeline
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Layout
from edgemesh.wire.messages import Release, Verdict

BUSY = {"dp": 2, "tp": 2, "pages": 30, "longest": 80, "aborts": 0.5, "spread_ms": 20, "max_prompt": 40, "max_out": 30}


def found(streams=lambda: None, **values):
    """What is found within a dozen seeds."""
    for seed in range(12):
        try:
            Simulation(seed, world(**BUSY | values), streams()).play()
        except SimulationError as error:
            text = str(error)
            return text if text.startswith(f"seed {seed} at ") else f"an error without its seed: {text}"
    return "nothing"


def test_nothing_is_found_where_nothing_is_wrong():
    assert found() == "nothing"


def test_pages_that_go_back_while_a_step_still_uses_them(monkeypatch):
    monkeypatch.setattr(GroupState, "waste", lambda self, pages: self.pages.drop(pages))
    assert "belongs to another prefix" in found() or "are shared by steps" in found()


def test_an_index_that_does_not_forget(monkeypatch):
    monkeypatch.setattr(Prefix, "_forget", lambda _self, _page: None)
    assert "the index knows a page" in found(documents=1, pages=22)


def test_a_page_that_is_lost(monkeypatch):
    drop = Pages.drop
    monkeypatch.setattr(Pages, "drop", lambda self, pages: drop(self, pages[1:]))
    assert "pages of 29 are free" in found()


def test_a_failed_draw_that_shares_its_last_position(monkeypatch):
    written = results._written
    monkeypatch.setattr(results, "_written", lambda state, run, _upto: written(state, run, run.upto))

    def alike():
        return [ask(f"r{each}", 1 + each % 20, 4, at_ms=each / 9) for each in range(60)]

    assert "are shared by steps" in found(alike, page_tokens=1, pages=200, retries=0.6)


def test_a_cached_prefix_that_covers_positions_which_are_still_to_be_scored(monkeypatch):
    monkeypatch.setattr(admission, "reach", lambda _sequence: None)
    assert "after 0 positions" in found(scored=1.0)


def test_log_probabilities_that_are_sent_again_after_a_preemption(monkeypatch):
    monkeypatch.setattr(scoring, "_send", send_from_the_start)
    assert "log-probabilities of its prompt after its first token" in found(scored=1.0, pages=24)


def send_from_the_start(state, sequence, found):
    sequence.scored = 0
    state.emit_scores(sequence, found)


def test_a_verdict_that_differs_between_groups(monkeypatch):
    def release(self, before, state, releases, _last):
        del before
        self.states[state.plane] = state
        for each in releases:
            for at, name in enumerate(self.names):
                verdict = Verdict(each.verdict.tokens, Layout.RAGGED, at)
                self.port.send(LinkKind.RELEASE, Release(each.plane, each.epoch, each.tick, verdict), name)

    monkeypatch.setattr(BarrierActor, "_release", release)
    assert "two verdicts of" in found()


def test_an_all_idle_tick(monkeypatch):
    monkeypatch.setattr(barrier, "_complete", lambda state: all(state.arrivals))
    assert "runs though all groups are idle" in found()


def test_an_idle_group_that_is_never_woken(monkeypatch):
    arrive = Pipeline.arrive
    monkeypatch.setattr(Pipeline, "arrive", lambda self, now: None if self.arrived == IDLE else arrive(self, now))
    assert "nothing moves any more" in found()


def test_a_token_of_an_earlier_life(monkeypatch):
    accept = results._accept
    monkeypatch.setattr(
        results, "_accept", lambda state, sequence, token, logprob: accept(state, sequence, token ^ 1, logprob)
    )
    assert "is right" in found()


def test_a_release_that_is_decided_without_a_group(monkeypatch):
    monkeypatch.setattr(barrier, "_complete", lambda state: any(each and each.shape.tokens for each in state.arrivals))
    assert "Error" in found()
