"""Inference workers: the wire protocol, model bundles, the worker runtime and three engines.

Layers, imports pointing strictly down: ``protocol`` < ``bundle`` < ``runtime`` < ``llama | ane | cuda``.
"""
