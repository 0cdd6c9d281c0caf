"""Agreement of ranks before the first call: messages, topology, signatures of calls."""
