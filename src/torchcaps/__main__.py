"""`python -m torchcaps` is `torchcaps`; torchrun starts processes this way."""

import sys

from torchcaps.cli import main

if __name__ == "__main__":
    sys.exit(main())
