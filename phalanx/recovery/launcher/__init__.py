"""The launcher's side of recovery; imports no torch."""
