"""What holds for every test."""

import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Before anything imports torch: two threads for a small product wait for each other longer than they work, and where something
# else has a core they wait for that, too. Ranks get theirs from the supervisor.
os.environ["OMP_NUM_THREADS"] = "1"

# Where no card is, Triton's kernels are interpreted; it looks for this when it is imported, by whomever.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Every run draws the same examples, and has no opinion of how long they take; ``--hypothesis-profile=search`` looks for new ones.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


def pytest_collection_finish(session):
    """What is loaded by now stays: no collection of garbage needs to walk through all of it again."""
    del session
    gc.collect()
    gc.freeze()
