"""`phalanx bench comm`: how fast each algorithm moves bytes here, in nccl-tests' columns.

`plan` describes what is measured and starts the ranks (no torch), `rank` measures, `report` shows tables and plots.
"""
