"""`python -m distributed.cli train ...` is `phalanx train ...`."""

from __future__ import annotations

import sys

from phalanx.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
