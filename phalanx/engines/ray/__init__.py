"""Ray: Ray Train as launcher, Ray Data as input, Ray's workers for the trials of a search."""
