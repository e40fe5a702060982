"""Analysis of traces that `profile` has recorded: split of each step, critical path, verdict. Without torch."""
