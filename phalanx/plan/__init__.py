"""The planner: which layout fits a model on a cluster, how fast it is, what it costs, and why."""
