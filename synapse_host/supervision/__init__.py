"""One lane: its queue, its worker's life, and what counts against it. Start with `supervisor.py`.

`supervisor` takes a request through standing, turn, worker, permit, deadline check and session. `lifecycle` starts,
loads, replaces and ends workers, also those that nobody uses; `queueing` says who is next, `sharing` who shares whose
exchange; `health` keeps what a worker said of itself. `quarantine` counts strikes and `standing` says
what follows from them: pure policy, with the time as an argument. Workers are reached through
:mod:`synapse_host.worker` alone; texts and the files of models are unknown here.
"""
