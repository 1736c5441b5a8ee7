"""What models say, at random, and streams of events read back."""

import json

from hypothesis import strategies as st

from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def said(draw):
    """The events of one choice: what was thought, said and called, cut at random."""
    events = [Reasoning(text) for text in draw(st.lists(TEXT, max_size=3))]
    for index in range(draw(st.integers(0, 3))):
        events += [Content(text) for text in draw(st.lists(TEXT, max_size=2))]
        events.append(CallBegin(index, f"call_{index}", draw(st.sampled_from("fgh"))))
        arguments = json.dumps(draw(st.dictionaries(TEXT, TEXT | st.integers() | st.none(), max_size=2)))
        at = draw(st.integers(0, len(arguments)))
        events += [CallArguments(index, text) for text in (arguments[:at], arguments[at:]) if text]
        events.append(CallEnd(index))
    return events + [Content(text) for text in draw(st.lists(TEXT, max_size=3))]


def uncut(events):
    """The same events with as few of them as can be."""
    joined = []
    for event in events:
        more = joined and hasattr(event, "text") and type(joined[-1]) is type(event)
        joined.append(_joined(joined.pop(), event) if more else event)
    return joined


def _joined(one, other):
    text = one.text + other.text
    return CallArguments(one.index, text) if isinstance(one, CallArguments) else type(one)(text)


def events_of(stream):
    """The JSON of every event, whose name and type are one."""
    assert stream.endswith(b"\n\n")
    found = []
    for each in stream.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = each.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found
