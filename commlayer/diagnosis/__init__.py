"""Who waits for whom: what every rank called, kept in a ring, merged into one graph over all
groups, said in words."""
