"""Fewer bytes on the wire: codecs, their kernels on a GPU, and the watch over their errors."""
