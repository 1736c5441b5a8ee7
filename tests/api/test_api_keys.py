"""Lines of a key file, what is kept of a key, and rates per minute."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemesh.api.keys import (
    MAX_KEYS,
    ApiKey,
    KeyFileError,
    KeyLimits,
    Keyring,
    hashed_line,
    parse_key,
    parse_keys,
    plain,
)
from edgemesh.api.quota import MINUTE_NS, charge, duration, remaining, wait_ns

KEYS = st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1, max_size=4)
HASH = "sha256:" + hashlib.sha256(b"secret").hexdigest()
DEFAULTS = KeyLimits(max_requests=9)


@given(keys=KEYS, other=st.binary(max_size=20))
def test_only_the_keys_are_found_and_none_is_kept(keys, other):
    known = Keyring([parse_key(key, KeyLimits(), "here") for key in keys], b"process")
    for key in keys:
        assert known.find(key.encode()).id == hashlib.sha256(key.encode()).hexdigest()[:16]
        assert key.encode() not in repr(vars(known)).encode() or len(key) < 4
    if other.decode("latin-1") not in keys:
        assert known.find(other) is None
    assert Keyring([], b"process").find(other) is None


def test_a_file_holds_plain_and_hashed_keys_with_names_and_limits_of_their_own():
    text = f"# ours\n\n  one \n{HASH} name=agents max_requests=2 tokens_per_minute=0\nthree requests_per_minute=7\n"
    one, two, three = parse_keys(text, DEFAULTS, "keys")
    assert (one.name, one.limits) == ("", DEFAULTS)
    assert (two.name, two.limits) == ("agents", KeyLimits(2))
    assert three.limits == KeyLimits(9, 7, 0)
    assert Keyring([two], b"").find(b"secret") == two
    assert [plain(text), plain(f"# x\n {HASH}\n"), plain("x")] == [True, False, True]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sha256:12", "after sha256: come 64 hexadecimal digits"),
        ("sha256:" + "g" * 64, "after sha256: come 64 hexadecimal digits"),
        ("hush hush", "after the key may stand, each once, name=NAME, max_requests=N"),
        ("hush burst=1", "after the key may stand"),
        ("hush name=a name=b", "each once"),
        ("hush name=", None),
        ("hush name=a/b", "name is 1 to 64 letters"),
        ("hush max_requests=-1", "max_requests is a whole number from 0"),
        ("hush tokens_per_minute=1e3", "tokens_per_minute is a whole number"),
        ("hush requests_per_minute=99999999999999", "requests_per_minute is a whole number"),
        ("hush max_requests=\u0663", "max_requests is a whole number"),
        ("h\u00fcsh", "printable ASCII"),
        ("h" * 513, "at most 512"),
    ],
)
def test_a_wrong_line_is_named_and_no_key_is_said(line, said):
    text = f"# first\n{line}\n"
    if said is None:
        assert parse_keys(text, DEFAULTS, "keys")
        return
    with pytest.raises(KeyFileError, match="keys, line 2: ") as caught:
        parse_keys(text, DEFAULTS, "keys")
    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_file_without_a_key_with_one_twice_or_with_too_many_is_refused():
    for text, said in (
        ("# none\n\n", "holds no API key"),
        (f"{HASH}\nsecret\n", "line 2: the same key stands in line 1"),
        ("\n".join(f"k{number}" for number in range(MAX_KEYS + 1)), f"the most is {MAX_KEYS}"),
    ):
        with pytest.raises(KeyFileError, match=said):
            parse_keys(text, DEFAULTS, "keys")


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    bounds=st.builds(KeyLimits, *[st.integers(0, 1 << 40)] * 3),
)
def test_a_made_line_reads_back(name, bounds):
    assert parse_keys(hashed_line("k", name, bounds), KeyLimits(), "x") == [
        ApiKey(hashlib.sha256(b"k").digest(), name, bounds)
    ]


# --- rates ---

STEPS = st.lists(st.tuples(st.integers(0, 2 * MINUTE_NS), st.integers(1, 50)), max_size=60)


@given(per_minute=st.integers(1, 40), steps=STEPS)
def test_in_no_time_more_is_taken_than_a_minutes_worth_and_what_came_back(per_minute, steps):
    due, now, taken = 0, 10, []
    for pause, amount in steps:
        now += pause
        wait = wait_ns(due, now, amount, per_minute)
        assert (wait == 0) == (amount <= remaining(due, now, per_minute)) or wait < MINUTE_NS // per_minute
        if amount > per_minute:
            assert wait
            continue
        if wait:
            assert wait_ns(due, now + wait, amount, per_minute) == 0
            continue
        due = charge(due, now, amount, per_minute)
        taken.append((now, amount))
    for at, (start, _) in enumerate(taken):
        within = 0
        for end, amount in taken[at:]:
            within += amount
            assert within <= per_minute * (1 + (end - start) / MINUTE_NS) + 1


def test_what_was_not_used_is_given_back_and_a_debt_is_waited_for():
    due = charge(0, 100, 60, 60)
    assert wait_ns(due, 100, 1, 60) == 1_000_000_000
    assert wait_ns(charge(due, 100, -10, 60), 100, 10, 60) == 0
    debt = charge(due, 100, 30, 60)
    assert remaining(debt, 100, 60) == 0
    assert duration(wait_ns(debt, 100, 1, 60)) == "31s"
    assert remaining(debt, 100 + 2 * MINUTE_NS, 60) == 60
