"""EdgeMesh: LLM serving on boxes of consumer GPUs without NVLink, as a mesh of event-driven actors.

The layout, from the bottom up; imports go only downward, and packages of one line never import each other::

    wire        every type that travels between processes, and who may send it to whom
    topology    one TOML file -> all actors and links of a mesh; pure
    decide      everything that decides: routing, scheduling, pages, barrier, supervision; pure
    runtime     sockets, the actor loop, traces, processes
    engine      the only torch: network, attention, collectives, sampler, weights and their memory
    api         the OpenAI API without its sockets
    grammar     which tokens a grammar allows next, worked out in a process of its own
    inspect     what ``edgemesh trace`` makes of the traces
    bench       load generators and their statistics
    actors      one file per kind of process
    cli         the commands

One request's walk:

1. ``actors.gateway`` reads the HTTP request, checks every parameter (``api``), tokenises, and sends a ``Submit``.
2. ``actors.router`` chooses the group (``decide.routing``) and hands it over in a ``Place``.
3. ``actors.group`` queues it, gives it KV pages and cuts its prompt into chunks (``decide.scheduling``).
4. For each step the group sends the barrier an ``Arrive``; when all groups that must step together have, a ``Release`` comes back.
5. The group's ``Plan`` goes to its prefill ranks (``actors.rank``), which run the network (``engine``) over the vault's memory.
6. The first token comes back in ``Done``; the KV pages stay where they are, and the request joins the decode plane's plans.
7. Every token goes from the group straight to the gateway in an ``Emit``.
8. The gateway turns tokens into text, looks for stop strings, and writes the stream to the client.
"""

__version__ = "0.1.0"
