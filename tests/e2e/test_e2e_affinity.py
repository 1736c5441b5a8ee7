"""A conversation's next turn goes to the group that holds its beginning, unless that group has too much to do."""

import pytest
from e2e_clients import CHAT, held, posting, text_of, together, words

ABOUT = {
    "rivers": "You are a guide who knows every river of Europe, and answers in one short sentence. " * 3,
    "bread": "You bake bread since forty years; explain what you do to a child, and leave nothing out. " * 3,
}


def turns(served, about, history, **fields):
    """One more turn of each conversation in ``history``, all at once; their answers are added to it."""
    calls = [posting(CHAT, messages=history[each], **fields) for each in about]
    answers = together(served, calls)
    for each, answer in zip(about, answers, strict=True):
        history[each] = [*history[each], {"role": "assistant", "content": text_of(answer)}]
        history[each].append({"role": "user", "content": "Go on, and tell me a little more about that."})
    return dict(zip(about, answers, strict=True))


def placed(traces, answers):
    """(group, why) of each answer's first choice."""
    found = {event["request"]: (event["group"], event["why"]) for event in traces.events("request.placed")}
    return [found[answer["id"]] for answer in answers]


@pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)
def test_the_next_turn_goes_where_its_beginning_is(served, traces):
    history = {
        each: [{"role": "system", "content": text}, {"role": "user", "content": "Where do I start?"}]
        for each, text in ABOUT.items()
    }
    # The first turns are long enough to be under way at the same time.
    said = [turns(served, ABOUT, history, max_tokens=tokens) for tokens in (24, 6, 6)]
    traces.settle()
    homes = set()
    for each in ABOUT:
        answers = [turn[each] for turn in said]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == sorted(set(cached)), "with each turn, more of it is known"
        assert cached[0] < 16
        for answer, before in zip(answers[1:], answers, strict=False):
            known = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert known > before["usage"]["prompt_tokens"] - 32, "all of the last prompt but its last page"
        (home, first), *later = placed(traces, answers)
        assert first.startswith("least outstanding tokens")
        assert [group for group, _ in later] == [home] * 2
        assert all(why.startswith("prefix of ") for _, why in later), later
        homes.add(home)
    assert homes == {0, 1}, "two conversations share the groups"


@pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)
@pytest.mark.parametrize("name", ["session", "prompt_cache_key", "user"])
def test_a_named_conversation_stays_even_if_its_beginning_changes(served, traces, name):
    answers = []
    for turn in range(4):
        # What comes first is another each time, as a date or a state of a game would be.
        asked = {"text": words(400, f"{name} {turn}"), "max_tokens": 2, name: f"game of {name}"}
        answers += together(served, [posting(**asked), posting(text=words(9, f"other {name} {turn}"), max_tokens=2)])
    traces.settle()
    named = placed(traces, answers[::2])
    assert {group for group, _ in named} == {named[0][0]}
    assert [why for _, why in named[1:]] == ["session"] * 3
    assert all("least outstanding tokens" in why for _, why in placed(traces, answers[1::2]))


@pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)
@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_leaves_an_overloaded_group_and_stays_where_it_went(served, traces, named):
    fields = {"text": words(400, f"overload {named}"), "max_tokens": 2} | (
        {"session": f"busy {named}"} if named else {}
    )

    def turn():
        (answer,) = together(served, [posting(**fields)])
        return answer

    answers = [turn(), turn()]
    traces.settle()
    (group, _), second = placed(traces, answers)
    with held(served, *map(str, range(12)), max_tokens=5000, group=group):
        answers += [turn(), turn()]
    traces.settle()
    moved, stayed = placed(traces, answers[2:])
    assert second[0] == group
    known = "session" if named else "prefix of "
    assert second[1].startswith(known)
    assert moved[0] != group
    assert moved[1].startswith(f"group {group} knows the {known}"), moved
    assert "is overloaded" in moved[1]
    assert stayed[0] == moved[0]
    assert stayed[1].startswith(known)
