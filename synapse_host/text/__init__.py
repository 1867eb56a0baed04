"""Text to token ids, on the host's side: workers receive ids only.

Opens a bundle's tokenizer within bounds, composes rows and pairs with the model's special tokens, renders chat
templates in a child process, and refuses what doesn't fit before anything is allocated or sent. It knows bundles and
limits, and neither lanes nor workers nor sockets. Heavy work runs beside the event loop (`background`). Start with
`tokenizer.py`; `encoders.py` is what the host asks.
"""
