"""`phalanx verify`: prove that a layout gives what one process gives.

`proofs` starts the runs that are compared, `rank` executes one of them, `probe` records it and compares two recordings,
`verdict` shows the result. `subject` is what is verified.
"""
