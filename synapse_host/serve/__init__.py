"""A running host that others talk to: operators over a Unix socket, collectors over HTTP.

`control` is the socket's protocol, `operations` what may be asked, `clients` who asks, `metrics` the figures. Every
answer comes from the host's own facade; a request for figures never reaches a worker. Start with `operations.py`.
"""
