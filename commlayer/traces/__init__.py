"""Traces of jobs: clocks made comparable, a file for each rank, and what several files say
together.

``clock`` relates the clocks of ranks, ``recorder`` keeps a rank's records (``call_records``),
``rank_files`` is their file, ``chrome_of_job`` writes them for Perfetto (``chrome_of_plan``: one
plan's timeline), ``analyse`` computes the tables of ``commlayer trace``. None of them loads torch.
"""
