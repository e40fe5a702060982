"""`phalanx verify`: prove that a layout gives the result of one process, and that a run survives faults.

`proofs` starts the runs that are compared, `rank` executes one of them, `probe` records it and compares two recordings,
`verdict` shows the result. `subject` is what is verified; `cases` are subjects that
show what a user's model may not meet. `faults` runs a real command while ranks are killed.
"""
