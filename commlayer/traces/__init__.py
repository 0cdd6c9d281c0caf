"""Traces of jobs: clocks made comparable, a file for each rank, and what several files say together.

``clock`` relates the clocks of ranks, ``files`` writes and reads what ``recorder`` has kept, ``events`` draws it for
Perfetto, ``analyse`` computes the tables of ``commlayer trace``. None of them loads torch.
"""
