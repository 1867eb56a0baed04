"""One worker process and its connection.

`process` starts and ends the child, `listener` and `handshake` admit exactly that child, `session` runs one exchange at
a time over `transport`, `watchdog` says how long silence may last, `output` keeps the last words, `crash` describes a
death. The owner of a session hears of it through the four methods of `session.Owner` and is otherwise unknown here, as
are lanes, queues and models. Start with `session.py`.
"""
