"""Settings of all tests: they share two cores with each other and with whatever else runs."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch is imported, as flexrun does
