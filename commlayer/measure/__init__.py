"""Measurements of what a cluster's links can do: probers, profilers, calibration, the benchmark of all_to_all."""
