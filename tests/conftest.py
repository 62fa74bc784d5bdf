"""Settings that hold for every test."""

from __future__ import annotations

import os

# One thread per process: many tests run several processes on a machine with few cores, and
# summing orders (and with them the last bits) must not depend on the number of cores. Read by
# torch when it is first imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Machines that build and test are shared and slow, so no example has a deadline; the examples are
# the same in every run, so that a red run can be repeated.
settings.register_profile("dapple", deadline=None, derandomize=True)
settings.load_profile("dapple")
