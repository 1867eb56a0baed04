"""What makes Core ML artifacts: a checkpoint becomes a package, and on a Mac a package becomes a compiled bundle.

It runs as a tool (``python -m engines.ane build|prepare|plan``) and writes what the worker next door loads.
It must not know the worker's engine or its model: files are all that passes between them.
Nothing here is imported for HELLO, LOAD or a request.
Open convert.py first: it holds the command line and the steps of a build; graph.py and a file for each family write
the networks.
"""
