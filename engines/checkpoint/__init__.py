"""What a Hugging Face checkpoint is: how it is read, checked, and turned into the files a bundle holds.

It reads config.json, safetensors and the files beside them, and refuses by name whatever would change a number without
a sign. Its programs (``package``, ``dequantize``, ``reference``) make weights and reference fixtures at build time; the
workers read a package's tensors through the same code at LOAD. It must not know an engine, the runtime, the wire's
framing or the host. Open ``read.py`` first.
"""
