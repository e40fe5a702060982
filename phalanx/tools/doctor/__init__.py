"""`phalanx doctor`: what is wrong or slow on a machine, with a fix for each finding. Needs no torch."""
