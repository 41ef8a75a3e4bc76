"""A child that does not end when its channel is closed: `python -m tests.ranks.hanging_child`."""

import sys
import threading


def hang_here() -> None:
    """For ever."""
    sys.stderr.write("hanging\n")
    threading.Event().wait()


if __name__ == "__main__":
    hang_here()
