"""May a lane serve: what was measured on this machine, whether it passes, and whether it still holds.

A certificate is the evidence document of a run (`document`). `verdict` is the one table of gates, `figures` computes
what each of them compares and `metrics` is the arithmetic on vectors that a run records; `recheck` judges a stored
document by matrix and bundle, `binding` says what numbers depend on, `standing` is the one answer that host, doctor and
commands get, and `admission` what it lets a lane do. Nothing here measures, starts a worker for a request or knows of
one lane's state: that is :mod:`synapse_host.certification` and :mod:`synapse_host.supervision`. It may ask a worker
program for its `--version` and read files. Start with `verdict.py`.
"""
