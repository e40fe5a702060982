"""Watching a run: events, the sinks that take them, and the words and clocks around them. A leaf without torch.

Import from the modules (`phalanx.observe.events`, `.stream`, `.console`, ...): each is light; none is imported here.
"""
