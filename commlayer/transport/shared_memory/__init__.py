"""Messages between the CPU ranks of one node through memory that they share."""
