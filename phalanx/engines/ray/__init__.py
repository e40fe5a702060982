"""Ray: Ray Train as launcher, Ray Data as input, Ray Tune as search engine."""
