"""What a cluster's links can do, measured: probers, profilers, calibration, the benchmark of all_to_all."""
