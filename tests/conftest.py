"""What holds for every test."""

import os

# Before anything imports torch: two threads for a small product wait for each other longer than they work, and where something
# else has a core they wait for that, too. Ranks get theirs from the supervisor.
os.environ["OMP_NUM_THREADS"] = "1"
