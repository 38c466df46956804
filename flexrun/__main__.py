"""``python -m flexrun`` and the console script."""

import sys

from flexrun.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
