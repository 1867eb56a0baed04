"""ONNX graphs of the model families, written in memory at LOAD from a checkpoint's tensors.

A model's description and its tensors come in; a serialised graph, its weights by name and the inputs it reads go out.
Nothing here runs a graph: this folder must not know of onnxruntime, sessions, devices, files, requests or settings.
Every file here is part of the kernel revision, because it decides which numbers come out of a checkpoint.
Open :mod:`engines.cuda.graphs.families` first: it has the table of the families and says which graphs a device gets.
"""
