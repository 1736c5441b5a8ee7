"""Links, time, traces and processes: what an actor runs on.

``link`` says what may pass; ``zmq``, ``zmq_async`` and ``memory`` carry it; ``actor`` is the loop of a synchronous
actor and ``progress`` its reports; ``process`` and ``paths`` are for who starts them.
"""
