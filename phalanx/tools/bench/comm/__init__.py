"""`phalanx bench comm`: how fast each algorithm moves bytes here, in nccl-tests' columns.

`plan` describes what is measured (no torch), `run` starts the ranks, `rank` measures, `cases` holds the algorithms by
name, `report` shows tables and plots, `expected` knows the nominal speed of the links.
"""
