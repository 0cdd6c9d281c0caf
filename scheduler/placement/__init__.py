"""Where experts lie under routing that is skewed: recorded loads, placements of experts on ranks, their price, and the choice.

Pure arithmetic on a profile: no torch. numpy is imported inside functions. Modules are imported by name.
"""
