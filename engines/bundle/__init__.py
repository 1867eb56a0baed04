"""Model bundles: what a model is on disk, agreed between host and workers at run time.

A bundle is a folder with ``manifest.json``, artifacts under their digests, and reference fixtures. This package reads
and validates those, hashes files and trees, and knows where prepared Core ML bundles lie on a machine. It must not
know how a checkpoint is read, nor any engine, the runtime or the host. Open ``manifest.py`` first.
"""
