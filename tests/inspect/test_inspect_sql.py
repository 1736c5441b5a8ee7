import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_trace import MS, TraceWriter, line, two_groups

from edgemesh.inspect import queries, sql
from edgemesh.inspect.store import TraceError, open_trace


def rows(trace, query):
    return trace.execute(query).fetchall()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_json_objects('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM sniff_csv('{file}')",
        "COPY events TO '{out}'",
        "COPY (SELECT 1) TO '{out}'",
        "EXPORT DATABASE '{out}'",
        "ATTACH '{out}' AS other",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "PRAGMA threads=1",
        "DROP TABLE events",
        "DELETE FROM events",
        "UPDATE events SET request = 'x'",
        "INSERT INTO events SELECT * FROM events",
        "CREATE TABLE mine AS SELECT 1",
        "SELECT 1; DROP TABLE events",
        "EXPLAIN ANALYZE DELETE FROM events",
        "CALL force_checkpoint()",
        "SELECT * FROM secret_of_the_caller",
        "",
        ";",
        "-- nothing",
    ],
)
def test_a_query_reads_the_trace_and_nothing_else(tmp_path, query):
    secret_of_the_caller = [("reached",)]
    two_groups(tmp_path / "trace")
    file, out = tmp_path / "secret.txt", tmp_path / "out"
    file.write_text("secret")
    with open_trace(tmp_path / "trace") as trace:
        before = rows(trace, "SELECT count(*) FROM events")
        with pytest.raises(TraceError) as error:
            sql.ask(trace, query.format(file=file, out=out))
        assert "\n" not in str(error.value)
        assert secret_of_the_caller[0][0] not in str(error.value)
        assert rows(trace, "SELECT count(*) FROM events") == before
    assert not out.exists()


def test_even_the_connection_itself_is_sealed(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace, pytest.raises(Exception, match=r"Permission|disabled"):
        trace.execute("SELECT * FROM read_text('/etc/hostname')")


def test_mistakes_in_sql_are_explained_with_a_remedy(tmp_path):
    two_groups(tmp_path)
    with open_trace(tmp_path) as trace:
        with pytest.raises(TraceError, match="double quotes"):
            sql.ask(trace, "SELECT group FROM ticks")
        with pytest.raises(TraceError, match="The tables are events, releases, sets, steps, ticks"):
            sql.ask(trace, "SELECT * FROM evnts")
        answer = sql.ask(trace, 'SELECT "group", count(*) AS n FROM ticks GROUP BY "group"')
        assert (answer.columns, answer.rows, answer.more) == (["group", "n"], [(1, 5)], False)
        bounded = sql.ask(trace, "SELECT * FROM range(1000000000)", limit=5)
        assert (len(bounded.rows), bounded.more) == (5, True)


HOSTILE = [
    "[bold]x[/bold]",
    "a'; DROP TABLE events; --",
    'say "hi"',
    "\x1b[2J\x1b]0;t\x07",
    "..\\..",
    "%s{0}",
    "[/]",
    "é\u202e",
]


@pytest.mark.parametrize("request_id", HOSTILE)
def test_hostile_ids_are_only_ids(tmp_path, request_id):
    two_groups(tmp_path, request=request_id)
    with open_trace(tmp_path) as trace:
        assert queries.find_request(trace, request_id) == request_id
        assert queries.timelines(trace, [request_id])[0].e2e_ns == 158 * MS


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_no_bytes_in_a_trace_make_reading_fail(tmp_path_factory, junk, data):
    to = TraceWriter(tmp_path_factory.mktemp("junk"))
    to.event("gateway-0", "request.received", 0, request="r")
    for each in junk:
        whole = line("group-0", "request.queued", 1, request="r")
        cut = data.draw(st.integers(0, len(whole)))
        to.raw("group-0", each + whole[:cut] + b"\n")
    with open_trace(to.directory) as trace:
        timeline = queries.slowest_requests(trace)[-1]
        assert sum(timeline.totals.values()) == timeline.e2e_ns
