"""`phalanx bench compression`: recipes under each compressor over slow links; `advise` predicts which one pays."""
