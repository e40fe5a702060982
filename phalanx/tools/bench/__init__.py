"""What `phalanx bench` runs: collectives on ranks, and the measurements of this machine."""
