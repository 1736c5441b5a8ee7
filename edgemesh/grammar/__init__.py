"""Grammars of outputs, on llguidance: which tokens may come next.

``matching`` is the library, bounded; ``worker`` is the process in which it runs, and ``notes`` what is said between that process and
whoever started it. A grammar comes from a client, and some make the library run long, take memory without end or overflow its
stack: so no process that serves others works one out itself, or loads the library.
"""
