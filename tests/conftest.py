"""Settings of all tests: they share two cores with each other and with whatever else runs."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
