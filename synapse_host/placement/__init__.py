"""Which engine a lane gets on this machine, and why not another.

`hw_matrix.yaml` is the only place that says what runs where: `matrix` has its types and `source` reads it, so that an
error names its place. `hardware` describes the machine, `probe` asks each engine in a throw-away child, `select`
chooses and `assignment` fixes the choice when a host opens. `interpreter`, `child` and `places` are what every child
process and every file of the user needs. This room starts no worker, judges no certificate and knows nothing of a
running lane. Start with `select.py`.
"""
