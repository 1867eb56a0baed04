"""One worker process and its connection: start with `session.py`.

`startup` spawns a worker and shakes hands with it, over an endpoint of `listener` and by the checks of `handshake`.
`session` then runs one exchange at a time over `transport`, under the silence windows of `watchdog`. `process` reads
the child's output into `output`, ends the child with its whole group and describes how it ended. The owner of a
session hears of it through `session.Owner`; lanes, queues and models are unknown here.
"""
