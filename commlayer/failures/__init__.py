"""Who failed, and how every wait ends: the failure detector, bounded waits, forked children, the
program's end."""
