"""Model bundles: what a model is on disk, agreed between host and workers."""
