"""Who keeps the ranks in step: one file a strategy."""
