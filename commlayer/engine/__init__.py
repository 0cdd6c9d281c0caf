"""A call: its plan, its place in the queue, the loop that posts its steps, its lane."""
