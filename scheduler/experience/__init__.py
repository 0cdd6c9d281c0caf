"""Experience: what a group's calls, trials and messages took, held against the prices by which the
group plans.

:class:`~commlayer.scheduler.experience.experience.Experience` is the one object that is told and
asked; the other modules are the parts that it is made of. Pure arithmetic: no torch. Modules are
imported by name.
"""
