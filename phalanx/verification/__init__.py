"""`phalanx verify`: prove that a layout gives what one process gives.

`proofs` says which runs are compared, `rank` executes one of them, `probe` records it, `compare` sets two recordings
side by side and `report` writes down what was found. What is verified is a `subject`.
"""
