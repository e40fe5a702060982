"""Serve a language model over HTTP, in the words of OpenAI's API."""
