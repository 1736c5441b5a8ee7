"""Load generator, reference loads and reports; it measures any OpenAI endpoint from outside.

``statistics`` and ``prompts`` are pure; ``events`` and ``client`` speak HTTP and SSE; ``load`` drives many calls at
once. ``launch`` and ``processes`` start a mesh and read what its processes cost. ``sockets``, ``gloo`` and ``generate`` are
what the mesh is measured beside.
"""
