from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_trace import TraceWriter, line

from edgemesh.inspect.follow import BACKLOG_BYTES, Follower, matches

ODD_TIMES = b"".join(b'{"ts":%b,"event":"x","tick":7}\n' % each for each in (b"-1", b"9" * 40, b"1.5", b"null", b'"1"'))


def ticks(lines):
    return [each["tick"] for each in lines]


def test_lines_come_once_and_whole(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("group-0", "tick.plan", 0, tick=0)
    follower = Follower(tmp_path)
    assert ticks(follower.look()) == [0]
    assert follower.look() == []
    whole = line("group-0", "tick.plan", 1, tick=1)
    to.raw("group-0", whole[:30])
    assert follower.look() == []
    to.raw("group-0", whole[30:] + b"not json\n[1]\n{}\n" + ODD_TIMES + line("group-0", "tick.plan", 2, tick=2))
    assert ticks(follower.look()) == [1, 2]
    follower.close()


def test_a_new_actor_is_read_from_its_beginning_and_lines_are_merged_by_time(tmp_path):
    to = TraceWriter(tmp_path)
    to.event("group-0", "tick.plan", 0, tick=0)
    follower = Follower(tmp_path)
    follower.look()
    to.event("rank-0.decode", "tick.step", 3, tick=3)
    to.event("group-0", "tick.plan", 2, tick=2)
    to.event("rank-0.decode", "tick.step", 5, tick=5)
    to.event("group-0", "tick.plan", 4, tick=4)
    assert ticks(follower.look()) == [2, 3, 4, 5]
    follower.close()


def test_the_first_look_gives_only_the_end_of_a_long_file(tmp_path):
    to = TraceWriter(tmp_path)
    one = line("group-0", "tick.plan", 0, tick=0)
    many = BACKLOG_BYTES // len(one) * 2
    to.raw("group-0", b"".join(line("group-0", "tick.plan", number, tick=number) for number in range(many)))
    follower = Follower(tmp_path)
    found = ticks(follower.look())
    assert found[-1] == many - 1
    assert many // 4 < len(found) < many
    assert found == list(range(found[0], many))
    follower.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["write", "write", "write", "tear", "rotate", "look"]), max_size=40))
def test_nothing_is_lost_or_repeated_across_rotations(tmp_path_factory, actions):
    to = TraceWriter(tmp_path_factory.mktemp("follow"))
    to.event("group-0", "tick.plan", 0, tick=0)
    follower = Follower(to.directory)
    seen = ticks(follower.look())
    written = 1
    for action in actions:
        if action == "look":
            seen += ticks(follower.look())
        elif action == "rotate":
            if to.path("group-0").exists():
                to.rotate("group-0", files=100)
        elif action == "tear":
            whole = line("group-0", "tick.plan", written, tick=written)
            to.raw("group-0", whole[: len(whole) // 2])
            seen += ticks(follower.look())
            to.raw("group-0", whole[len(whole) // 2 :])
            written += 1
        else:
            to.event("group-0", "tick.plan", written, tick=written)
            written += 1
    seen += ticks(follower.look())
    to.event("group-0", "tick.plan", written, tick=written)
    seen += ticks(follower.look())
    assert seen == list(range(written + 1))
    follower.close()


def test_filters_take_prefixes_and_find_requests_in_plans():
    plan = {"actor": "group-1", "event": "tick.plan", "requests": ["abc", "xyz"]}
    assert matches("group", "tick", "ab")(plan)
    assert matches(None, None, None)(plan)
    assert not matches("rank", None, None)(plan)
    assert not matches(None, "request", None)(plan)
    assert not matches(None, None, "zz")(plan)
    assert not matches(None, None, "a")({"actor": 3, "requests": "abc", "request": 5})
