"""Settings of the whole suite: property tests have no deadline, because the machines that run them are shared."""

from __future__ import annotations

import os

# A job of the backend that finds no profile measures one and keeps it in the user's cache: only tests of that do so.
os.environ.setdefault("COMMLAYER_PROFILE", "none")
os.environ.setdefault("COMMLAYER_TRIALS", "off")
os.environ.setdefault("COMMLAYER_REPLAN", "off")
# Tables are as wide as a pipe's, also where a user exports the width of his terminal; pytest-xdist does so for its workers.
os.environ.pop("COLUMNS", None)

try:
    from hypothesis import settings
except ImportError:  # tests/gpu also runs with a GPU machine's own packages (see CONTRIBUTING.md), and needs none of it
    pass
else:
    settings.register_profile("commlayer", deadline=None)
    settings.load_profile("commlayer")
