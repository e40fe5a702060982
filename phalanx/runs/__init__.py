"""The parent side of a run: its folder, checks before the start, config -> LaunchSpec, start of the ranks. No torch."""
