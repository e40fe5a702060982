"""The launchers of a job under simulation: the real state machines, with a network, clocks, disks and faults of ours.

One seed is one history: `python -m tests.simulation --seed 4711` prints it, with `--shrink` the shortest that fails.
"""
