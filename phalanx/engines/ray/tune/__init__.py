"""Searches on Ray Tune."""
