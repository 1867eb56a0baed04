"""ONNX graphs written node by node, one module a family.

`builder` is what they share, `families` the table of them and of which graphs each device runs. A graph is a value:
nothing here opens a session. Start with `families.py`; a new family is one module and one row there.
"""
