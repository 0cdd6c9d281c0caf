"""What ranks tell each other once, before the first call: messages, topology, signatures of calls."""
