"""Serve a language model over an OpenAI-compatible HTTP API."""
