"""May a lane serve: what was measured on this machine, whether it passes, and whether it still holds.

A certificate is the evidence document itself (`document`). `verdict` is the one table of gates, `metrics` the
arithmetic behind it, `recheck` judges a stored document by matrix and bundle, `binding` says what numbers depend on,
`standing` is the one answer that host, doctor and commands get. Nothing here measures: that is
:mod:`synapse_host.certification`. Start with `verdict.py`.
"""
