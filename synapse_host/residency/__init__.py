"""Which Neural Engine functions are resident, and who may use them now.

`core` decides (pure: events in, actions out, `now` as an argument), `shell` carries the actions out on the event loop,
`plan` says which functions a request needs, `lane` puts both before a supervisor, `machine_lock` keeps a second host
off the engine. It knows shapes and budgets, not texts or files. Start with `core.py`.
"""
