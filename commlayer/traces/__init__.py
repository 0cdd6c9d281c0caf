"""Traces of jobs: clocks made comparable, a file for each rank, and what several files say together.

``clock`` relates the clocks of ranks, ``recorder`` keeps a rank's ``records`` until it writes them, ``files`` is their format,
``events`` draws it for Perfetto, ``analyse`` computes the tables of ``commlayer trace``. None of them loads torch.
"""
