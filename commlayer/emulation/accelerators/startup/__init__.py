"""A folder for PYTHONPATH: Python runs its ``sitecustomize`` before a rank's program (:mod:`commlayer.emulation.accelerators.starting`)."""
