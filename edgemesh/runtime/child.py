"""The first lines of every actor's process: bind its life to the supervisor's, then run the actor's module.

``python -m edgemesh.runtime.child PARENT MODULE ARGUMENTS...``; this comes before any import that takes long.
"""

import runpy
import signal
import sys

from edgemesh.runtime.process import die_with_parent, name_process


def main() -> None:
    """Set the death signal, ignore the terminal's interrupt, and become the module."""
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    # The supervisor decides when actors end; a terminal's Ctrl-C or a stray SIGTERM does not.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "--name" in arguments:
        name_process(arguments[arguments.index("--name") + 1])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
