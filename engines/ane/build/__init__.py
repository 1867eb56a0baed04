"""Core ML packages from a checkpoint, prepared on the machine that will run them; nothing of it runs in a worker.

`graph` writes the functions, `convert` the package, `prepare` compiles it at a stable path and pays its first load,
`plan` prints where Core ML would run each operation. Start with `convert.py`.
"""
