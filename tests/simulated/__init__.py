"""A simulated device: streams and events, memory that is handed on early, and communicators with NCCL's order, on any machine."""
