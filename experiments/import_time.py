"""Print how long `import torchcaps` takes beyond torch, in milliseconds: the median over fresh interpreters.

python experiments/import_time.py [--times 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence

CODE = "import time, torch; t = time.perf_counter(); import torchcaps; print(1000 * (time.perf_counter() - t))"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9, help="how many interpreters (9)")
    times = parser.parse_args(words).times
    taken = [float(subprocess.check_output([sys.executable, "-c", CODE])) for _ in range(times)]
    print(f"import torchcaps: {statistics.median(taken):.0f} ms beyond torch ({min(taken):.0f} to {max(taken):.0f})")


if __name__ == "__main__":
    main()
