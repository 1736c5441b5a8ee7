"""A person's own question to a loaded trace: one reading statement, bounded in rows."""

import re
from typing import Any, Final

import duckdb
import msgspec

from edgemesh.inspect.store import TraceError

MAX_ROWS: Final = 100_000

_UNQUOTED: Final = re.compile(r'(?<!")\b(group|set|last)\b(?!"|\s+by\b)', re.IGNORECASE)
"""Columns whose names are words of SQL, used without quotes."""


class Answer(msgspec.Struct, frozen=True):
    """A table; ``more`` says that rows beyond the limit were left out."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool


def ask(trace: duckdb.DuckDBPyConnection, query: str, limit: int = 1000) -> Answer:
    """Run one SELECT over the tables events, ticks, steps, releases and sets.

    Raises ``TraceError``, in one paragraph, for anything else: several statements, one that writes, a mistake in it, or a
    reach for a file.
    """
    limit = max(1, min(limit, MAX_ROWS))
    try:
        statements = trace.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            message = "Only one reading statement (SELECT, FROM, WITH, DESCRIBE or SUMMARIZE) can be asked."
            raise TraceError(message)
        result = trace.execute(statements[0])
        columns = [column[0] for column in result.description or ()]
        rows = result.fetchmany(limit + 1)
    except (duckdb.Error, RuntimeError) as error:
        raise TraceError(_explained(trace, query, error)) from error
    return Answer(columns, rows[:limit], more=len(rows) > limit)


def _explained(trace: duckdb.DuckDBPyConnection, query: str, error: Exception) -> str:
    text = " ".join(str(error).strip().split("\n\n")[0].split()).rstrip(".") + "."
    if isinstance(error, duckdb.PermissionException):
        return f"{text} A query reads the loaded trace only: no files, no network, no settings."
    if isinstance(error, duckdb.ParserException) and _UNQUOTED.search(query):
        return f'{text} The columns "group", "set" and "last" are words of SQL: write them in double quotes.'
    names = [row[0] for row in trace.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()]
    return f"{text} The tables are {', '.join(names)}; `DESCRIBE events` lists the columns of one."
