"""Which ranks do what: mappings of a model onto a cluster, what they take in memory and in time, and the search for the best.

Pure arithmetic on profiles: no torch. Modules are imported by name, for the command line must start quickly.
"""
