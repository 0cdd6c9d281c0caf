"""Devices: streams on which work is launched, and events by which streams wait for each other; CUDA's, and the contract."""
