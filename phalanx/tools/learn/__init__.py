"""`phalanx learn`: the course from the command line."""
