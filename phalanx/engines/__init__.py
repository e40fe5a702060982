"""Foreign engines, one folder each: launcher, strategy, trainer, data and tuning backend of that engine."""
