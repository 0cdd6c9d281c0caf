"""Emulated accelerators: computation of CPU tensors that takes the time of a declared device, and no core; docs/emulation.md."""
