"""`python -m partjit`."""

import sys

from partjit.command import main

if __name__ == "__main__":
    sys.exit(main())
