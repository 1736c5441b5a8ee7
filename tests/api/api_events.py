"""The events of a text that a parser reads in pieces."""

import itertools

from edgemesh.api.parser import MessageParser


def events_of(parsing, text, cuts=()):
    """What it tells of the text, cut at these places, to its end."""
    numbers = itertools.count()
    parser = MessageParser(parsing, lambda: f"c{next(numbers)}")
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    events = []
    for a, b in itertools.pairwise(places):
        events += parser.feed(text[a:b])
    return events + parser.finish()
