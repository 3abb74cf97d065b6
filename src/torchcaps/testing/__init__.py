"""The library's own instruments, for its tests and for yours.

Each returns nothing, or a count, or raises an AssertionError that names the law that was broken.
"""

from torchcaps.testing.resume import assert_resumes
from torchcaps.testing.routers import Over, assert_finite, assert_router, variants
from torchcaps.testing.systems import assert_system

__all__ = ["Over", "assert_finite", "assert_resumes", "assert_router", "assert_system", "variants"]
