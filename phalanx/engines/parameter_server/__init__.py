"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `placement` (who holds what), then `core` (when a step is taken), then `client`.
"""
