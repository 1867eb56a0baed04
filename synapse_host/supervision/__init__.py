"""One lane: its queue, its worker's life, and what counts against it.

`supervisor` takes a request through gate, queue, lifecycle, permit, deadline check and session; `lifecycle` starts,
loads, replaces and ends workers; `quarantine` and `standing` decide what is a strike and when a lane opens again (pure
policy, `now` is an argument); `queueing` says who is next, `sharing` who shares whose exchange. It speaks to a worker
only through :mod:`synapse_host.worker` and knows neither texts nor models' files. Start with `supervisor.py`.
"""
