"""Reads the traces that the actors wrote, and says where the time of a request went.

``store`` loads a trace directory into DuckDB, ``queries`` asks it, ``timeline`` turns events into one request's
causal timeline (pure), ``blame`` adds timelines up, ``terminal`` shows all of it to a person (``escape``: whatever it holds), ``exports`` to
Perfetto, ``page`` to a browser, and ``follow`` reads along while the actors still write.
"""
