"""Tools for testing code that runs on a cluster: the pytest fixture `emulated_cluster` (see `commlayer.emulation`)."""
