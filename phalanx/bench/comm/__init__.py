"""`phalanx bench comm`: how fast each algorithm moves bytes here, in nccl-tests' columns.

`plan` says what is measured and checks it (no torch), `rank` measures on the ranks, `movers` holds what is measured by
name, `report` and `plot` show it, `expected` knows what the links should do.
"""
