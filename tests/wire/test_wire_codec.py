import math
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import LONG_TOKENS, MESSAGES, strategy

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import CARRIES, LinkKind
from edgemesh.wire.codec import INLINE_BYTES, MAX_FRAME_BYTES, MAX_FRAMES, Decoder, WireError, encode
from edgemesh.wire.messages import Message, Sampling, Stop, Submit
from edgemesh.wire.schema import all_messages

WHOLE = Decoder(*all_messages())


def submit(**changes):
    base = {"request": "r", "attempt": 0, "gateway": 0, "prompt": TokenArray(), "sampling": Sampling(), "max_tokens": 1}
    return Submit(**(base | changes))


@pytest.mark.parametrize("kind", all_messages(), ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_went(kind):
    @given(strategy(kind))
    @settings(max_examples=25, deadline=None)
    def round_trip(message):
        frames = [bytes(frame) for frame in encode(message)]
        decoded = WHOLE.decode(frames)
        assert type(decoded) is kind
        assert decoded == message
        assert [bytes(frame) for frame in encode(decoded)] == frames
        assert WHOLE.decode([memoryview(frame) for frame in frames]) == message

    round_trip()


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_messages_are_frozen_and_equal_only_to_themselves(message):
    field = message.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(message, field, None)
    assert message == msgspec.structs.replace(message)


def test_all_link_kinds_together_carry_every_message():
    assert {kind for union in CARRIES.values() for kind in union} == set(all_messages())
    assert set(CARRIES) == set(LinkKind)


def test_small_arrays_travel_inside_and_large_ones_beside_without_a_copy():
    edge = INLINE_BYTES // 4
    assert len(encode(submit(prompt=TokenArray.of(range(edge))))) == 1
    large = TokenArray.of(range(edge + 1))
    frames = encode(submit(prompt=large, emitted=TokenArray.of(range(1000))))
    assert len(frames) == 3
    assert frames[1] == large.buffer
    decoded = WHOLE.decode(frames)
    kept = bytearray(frames[1])
    view = WHOLE.decode([frames[0], memoryview(kept), frames[2]]).prompt
    kept[0:4] = (77).to_bytes(4, "little")
    assert (decoded.prompt[0], view[0]) == (0, 77)


def test_an_inline_array_does_not_hold_the_frame_that_it_came_in():
    frame = bytearray(encode(submit(prompt=TokenArray.of([5, 6])))[0])
    decoded = WHOLE.decode([memoryview(frame)])
    frame[:] = bytes(len(frame))
    assert decoded.prompt.tolist() == [5, 6]


@given(LONG_TOKENS, LONG_TOKENS)
@settings(max_examples=25, deadline=None)
def test_frames_that_do_not_match_the_message_are_refused(prompt, emitted):
    head, first, second = encode(submit(prompt=prompt, emitted=emitted))
    for frames in (
        [head],
        [head, first],
        [head, first, second, b""],
        [head, first, second, first],
        [first, head, second],
    ):
        with pytest.raises(WireError):
            WHOLE.decode(frames)
    with pytest.raises(WireError, match="whole number"):
        WHOLE.decode([head, bytes(first) + b"x", second])


def test_limits_of_frames():
    stop = encode(Stop("x"))[0]
    for frames in ([], [stop] * (MAX_FRAMES + 1)):
        with pytest.raises(WireError, match="frames"):
            WHOLE.decode(frames)
    with pytest.raises(WireError, match="bytes; the most is"):
        WHOLE.decode([bytes(MAX_FRAME_BYTES + 1)])
    with pytest.raises(WireError, match="bytes; the most is"):
        WHOLE.decode([stop, bytes(MAX_FRAME_BYTES + 1)])


def test_after_an_error_a_decoder_works_and_holds_no_frames():
    head, first = encode(submit(prompt=TokenArray.of(range(1000))))
    with pytest.raises(WireError):
        WHOLE.decode([head])
    assert WHOLE.decode([head, first]).prompt.tolist() == list(range(1000))
    assert WHOLE.decode(encode(Stop("x"))) == Stop("x")


@pytest.mark.parametrize(
    "value",
    [
        ["stop"],
        ["stop", "x", "y"],
        ["Stop", "x"],
        ["stop", 1],
        ["stop", "x" * 4097],
        ["drain", -1],
        ["drain", 1 << 63],
        ["drain", True],
        ["drain", 1.5],
        ["no-such", 1],
        {"type": "stop", "reason": "x"},
        "stop",
        [],
        None,
        ["attached", 64, "decode", 0, 0],
        ["attached", 0, "neither", 0, 0],
        ["hello", "not an actor", 0, 1],
        ["hello", "rank-1.decode\n", 0, 1],
    ],
    ids=repr,
)
def test_what_is_no_message_is_a_wire_error(value):
    with pytest.raises(WireError):
        WHOLE.decode([msgspec.msgpack.encode(value)])


def test_an_array_field_takes_nothing_but_an_array_extension():
    fields = msgspec.msgpack.decode(encode(submit())[0], ext_hook=lambda _, __: None)
    place = list(Submit.__struct_fields__).index("prompt") + 1
    for value in (None, [1, 2], "abcd", b"abcd", msgspec.msgpack.Ext(3, b"abcd"), msgspec.msgpack.Ext(2, b"\1")):
        fields[place] = value
        with pytest.raises(WireError):
            WHOLE.decode([msgspec.msgpack.encode(fields)])


def test_a_value_that_has_no_wire_form_is_not_encoded():
    with pytest.raises(NotImplementedError, match="object"):
        encode(Stop(object()))


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=300))
@settings(max_examples=50, deadline=None)
def test_token_arrays_are_immutable_runs_of_ids(ids):
    tokens = TokenArray.of(ids)
    assert (tokens.tolist(), list(tokens), len(tokens)) == (ids, ids, len(ids))
    assert tokens == TokenArray(array("i", ids)) == TokenArray(bytes(tokens.buffer))
    assert hash(tokens) == hash(TokenArray.of(ids))
    assert tokens.slice(1, 3).tolist() == ids[1:3]
    assert tokens.buffer.readonly
    assert tokens != ids
    assert repr(tokens) == f"TokenArray({ids!r})"


def test_token_arrays_refuse_what_is_no_run_of_ids():
    with pytest.raises(ValueError, match="not a whole number"):
        TokenArray(b"abc")
    with pytest.raises(OverflowError):
        TokenArray.of([1 << 31])
    assert issubclass(WireError, ValueError)
    assert issubclass(Stop, Message)


@pytest.mark.parametrize("field", msgspec.structs.fields(Sampling), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_setting_of_a_draw_is_anything_but_a_finite_number(field, value):
    one = ((1, value),) if field.name == "logit_bias" else value
    with pytest.raises(WireError):
        WHOLE.decode(encode(submit(sampling=msgspec.structs.replace(Sampling(), **{field.name: one}))))
