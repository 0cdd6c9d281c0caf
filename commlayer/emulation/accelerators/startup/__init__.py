"""A folder for PYTHONPATH, from which Python runs ``sitecustomize`` before a rank's program."""
