"""Speed and memory, always as ratios to a reference measured beside it: the plain path, the trunk, a matrix product.

    python -m benchmarks            the cases, and how they compare with an earlier run
    python -m benchmarks.NAME       one study each: crossover, epochs, explore, growth, public_code, routers,
                                    size_steps, small_batches, steps
    python -m benchmarks.compare_commits OLD_SRC NEW_SRC

Run from the root of the repository; the JSON files beside the code are what these wrote.
"""

import os

# As the command line does, before torch is loaded: its idle threads shall not spin on the cores that loops want.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
