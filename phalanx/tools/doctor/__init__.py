"""`phalanx doctor`: what is wrong or slow on a machine, and what mends it. Needs no torch."""
