"""A program that waits until the guard knows of its process, and then becomes another program.

    python gate.py FD COMMAND...

waits for a byte from the file descriptor. If there is none, the launcher is gone, and nothing is started.
"""

import os
import sys

if __name__ == "__main__":
    _reader = int(sys.argv[1])
    _opened = os.read(_reader, 1)
    os.close(_reader)
    if _opened:
        os.execv(sys.argv[2], sys.argv[2:])
