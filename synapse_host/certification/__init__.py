"""A certification run: a lane is driven as a caller would and what it answers is measured.

`run` is the order of the steps and carries out what a command asked for, `trial` asks and records, `measurement` says
what each task is asked, `probes` are the inputs, `packing` asks what only a Neural Engine has, and `report` writes the
page for people. It judges nothing: figures go into a document and :mod:`synapse_host.certificates` decides. It must
not know how a worker is started or a batch is split: it sees a host and its calls. Start with `run.py`.
"""
