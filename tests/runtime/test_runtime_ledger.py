"""The numbers that gateways share: the same for all, whoever makes a row, and nothing of a dead one's."""

import multiprocessing
import stat

from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.runtime import ledger as module
from edgemesh.runtime.ledger import Ledger


def digest(number):
    return number.to_bytes(32, "big")[::-1]


def opened(ledger, key, change):
    with ledger.row(digest(key)) as row:
        row.opened(change)
        return row.open


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40))
def test_all_ledgers_of_one_file_say_the_same(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledgers = [Ledger(path, index, 3) for index in range(3)]
    counts = dict.fromkeys(range(6), 0)
    for index, key in steps:
        counts[key] += 1
        assert opened(ledgers[index], key, 1) == counts[key]
        with ledgers[index].row(digest(key)) as row:
            row.requests_due_ns, row.tokens_due_ns = key << 40, -key
    for ledger in ledgers:
        for key, count in counts.items():
            with ledger.row(digest(key)) as row:
                assert row.open == count
                if count:
                    assert (row.requests_due_ns, row.tokens_due_ns) == (key << 40, -key)


def test_a_gateway_that_starts_anew_has_nothing_open_and_the_others_keep_theirs(tmp_path):
    path = tmp_path / "ledger"
    first, second = Ledger(path, 0, 2), Ledger(path, 1, 2)
    assert (opened(first, 7, 3), opened(second, 7, 2)) == (3, 5)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert opened(Ledger(path, 0, 2), 7, 0) == 2
    assert opened(first, 7, 1) == 3


def test_a_lone_gateways_ledger_is_its_own_and_everyone_is_one_key():
    one, other = Ledger(), Ledger()
    with one.row(b"") as row:
        row.opened(1)
    with one.row(b"") as row, other.row(b"") as others:
        assert (row.open, others.open) == (1, 0)


def test_keys_beyond_the_rows_share_the_last(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 3)
    ledger = Ledger()
    assert [opened(ledger, key, 1) for key in range(1, 6)] == [1, 1, 1, 2, 3]
    assert opened(ledger, 1, 0) == 1


def _take(path, index, count):
    ledger = Ledger(path, index, 4)
    for _ in range(count):
        with ledger.row(digest(1)) as row:
            row.tokens_due_ns += 1
            row.opened(1)


def test_processes_at_once_lose_no_change(tmp_path):
    # A fork of this process would hold whatever locks its other threads hold now.
    context, path = multiprocessing.get_context("spawn"), tmp_path / "ledger"
    workers = [context.Process(target=_take, args=(path, index, 3000)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    with Ledger(path, 3, 4).row(digest(1)) as row:
        assert row.tokens_due_ns == 12000
        assert row.open == 9000
