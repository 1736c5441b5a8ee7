"""Everything that decides, as pure functions and plain state: no clock, sockets, torch, logging or randomness.

Time comes in as a number, and what is to be done goes out as data. ``request`` is one request's life, ``queue`` the order of
those that wait, ``pages`` and ``prefix`` the KV memory, ``steps`` the pipeline of ticks of a plane, ``scheduling`` the group
that owns all of these, ``scoring`` what is asked of prompts' log-probabilities; ``barrier`` agrees on ticks between groups, and ``routing`` chooses the group of a request.
"""
