"""Measured training steps: verify a schedule, compare ways to train, measure a model as it is."""
