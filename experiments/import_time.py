"""How long `import torchcaps` takes beyond torch, in milliseconds: the median of fresh interpreters.

python experiments/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = "import time, torch; t = time.perf_counter(); import torchcaps; print(1000 * (time.perf_counter() - t))"


def main(times: int = 9) -> None:
    taken = [float(subprocess.check_output([sys.executable, "-c", CODE])) for _ in range(times)]
    print(f"import torchcaps: {statistics.median(taken):.0f} ms beyond torch ({min(taken):.0f} to {max(taken):.0f})")


if __name__ == "__main__":
    main()
