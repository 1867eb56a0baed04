"""The owned worker: embeds and reranks with onnxruntime, on an NVIDIA GPU or on any CPU as the onnx-cpu lane.

It reads a bundle's safetensors package, builds ONNX graphs of it in memory at LOAD and runs them on token ids. Both
devices share the graphs' code, the plan of a request and its loop. It must not know texts, tokenizers, other engines or
the host; the wire and the request loop belong to :mod:`engines.runtime`, checkpoints to :mod:`engines.checkpoint`.
Open :mod:`engines.cuda.engine` first: it tells how a model is loaded and how a request runs.
"""
