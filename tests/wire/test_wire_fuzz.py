"""Every kind of link's decoder meets bytes that nobody meant: it answers with a message of its union or a WireError."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import least, strategy

from edgemesh.wire.catalogue import CARRIES, LinkKind
from edgemesh.wire.codec import Decoder, WireError, encode

DECODERS = {kind: Decoder(*CARRIES[kind]) for kind in LinkKind}

JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def survives(kind, frames):
    """Whether it decoded; anything but a message of the union or a WireError fails the test."""
    try:
        message = DECODERS[kind].decode(frames)
    except WireError:
        return False
    assert type(message) in CARRIES[kind]
    assert DECODERS[kind].decode(encode(message)) == message or "nan" in repr(message)
    return True


@pytest.mark.parametrize("kind", LinkKind)
def test_random_bytes(kind):
    @given(st.lists(st.binary(max_size=60), max_size=4))
    @settings(max_examples=60, deadline=None)
    def fuzz(frames):
        survives(kind, frames)

    fuzz()


@pytest.mark.parametrize("kind", LinkKind)
def test_random_msgpack_behind_a_true_tag(kind):
    tags = [message.__struct_config__.tag for message in CARRIES[kind]]

    @given(st.sampled_from(tags), st.lists(JSON_LIKE, max_size=14))
    @settings(max_examples=60, deadline=None)
    def fuzz(tag, fields):
        survives(kind, [msgspec.msgpack.encode([tag, *fields])])

    fuzz()


@st.composite
def mutated(draw, kind):
    frames = [bytearray(frame) for frame in encode(draw(st.one_of([strategy(each) for each in CARRIES[kind]])))]
    for _ in range(draw(st.integers(1, 4))):
        which = draw(st.integers(0, len(frames) - 1))
        frame = frames[which]
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "drop", "repeat", "swap"])):
            case "flip" if at < len(frame):
                frame[at] ^= draw(st.integers(1, 255))
            case "cut":
                del frame[at : at + draw(st.integers(1, 8))]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "drop" if len(frames) > 1:
                del frames[which]
            case "repeat":
                frames.insert(which, bytearray(frame))
            case "swap":
                frames.reverse()
            case _:
                pass
    return frames


@pytest.mark.parametrize("kind", LinkKind)
def test_mutated_messages(kind):
    @given(mutated(kind))
    @settings(max_examples=60, deadline=None)
    def fuzz(frames):
        survives(kind, frames)

    fuzz()


@pytest.mark.parametrize("kind", LinkKind)
def test_every_truncation_and_every_single_byte_change_of_one_message(kind):
    for each in CARRIES[kind]:
        head, *rest = (bytes(frame) for frame in encode(least(each)))
        for end in range(len(head)):
            assert not survives(kind, [head[:end], *rest])
        for at in range(len(head)):
            for value in (0x00, 0x7F, 0x80, 0x9F, 0xC0, 0xC1, 0xC6, 0xC9, 0xCB, 0xCF, 0xDB, 0xDD, 0xDF, 0xFF):
                survives(kind, [head[:at] + bytes([value]) + head[at + 1 :], *rest])


@pytest.mark.parametrize("kind", LinkKind)
def test_hostile_sizes_and_depths_cost_nothing(kind):
    for head in (
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff" + b"\xc0" * 100,
        b"\xa4stop" * 1000,
    ):
        assert not survives(kind, [head])
        assert not survives(kind, [b"\x92\xa4stop" + head])
