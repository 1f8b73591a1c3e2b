"""`python -m partjit.launch`, which is `partjit launch`."""

import sys

from partjit.command import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
