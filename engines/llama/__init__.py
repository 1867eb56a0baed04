"""The llama engine: embeddings, reranking and generation through llama.cpp, on CPU and Metal.

It reads a GGUF's header itself, loads the file with llama-cpp-python's C functions and turns token rows into vectors,
scores or text. ``binding.py`` is the only file that calls the native library; ``build/`` makes GGUF files and is
imported by no worker. It must not know the host, another engine or the wire's framing. Open ``engine.py`` first.
"""
