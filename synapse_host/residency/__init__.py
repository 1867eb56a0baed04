"""Which Neural Engine functions are resident, and who may use them now.

It keeps the books of all Neural Engine lanes of a host, admits and evicts functions, and serves requests part by part.
`core` decides (pure: events in, actions out, `now` as an argument) over the nouns in `types`; `shell` carries the
actions out on the event loop; `plan` says which functions a request's rows need; `lane` is one lane before its
supervisor. `machine_lock` keeps a second host off the engine. The room knows shapes, leases and budgets; it must not
know texts, files or how a worker is started. Open `core.py` first: it has the theory of operation.
"""
