"""What only builds: a checkpoint becomes a GGUF, a GGUF's vocabulary becomes a tokenizer.json.

``python -m engines.llama build`` and ``python -m engines.llama tokenizer`` run it, in a process of their own. It needs
the ``gguf`` package, which no worker needs. It must not know the worker: nothing of it is imported at LOAD or while
serving, and it calls no native library. Open ``convert.py`` first.
"""
