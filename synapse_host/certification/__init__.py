"""A certification run: a lane is driven as a caller would and what it answers is measured.

`run` is the order of the steps, `trial` drives and measures, `probes` are the inputs, `packing` and `compute_plan` ask
what only the Neural Engine has, `report` writes the page for people. It judges nothing: figures go into a document and
:mod:`synapse_host.certificates` decides. Start with `run.py`.
"""
