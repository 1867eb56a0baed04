"""Which engine a lane gets on this machine, and why not another.

`hw_matrix.yaml` is the only place that says what runs where; `matrix` has its types, `source` reads it with positions for error
messages, `hardware` describes the machine, `probe` asks each engine in a throw-away child, `select` chooses and
`assignment` fixes the choice when a host opens. It starts no worker and keeps no state of a running lane. Start with
`select.py`.
"""
