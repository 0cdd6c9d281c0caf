"""The audit of planned calls: promised against measured, and what follows from it while a job
runs."""
