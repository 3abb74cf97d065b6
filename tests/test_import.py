"""What `import torchcaps` does to a process: next to nothing."""

from __future__ import annotations

import subprocess
import sys

import torchcaps


def test_importing_writes_no_environment_variable_and_loads_no_torch():
    code = """
import os, sys
before = dict(os.environ)
import torchcaps
print(before == dict(os.environ), 'torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_every_public_name_is_there():
    assert all(getattr(torchcaps, name) is not None for name in torchcaps.__all__)
    assert not hasattr(torchcaps, "rout")
