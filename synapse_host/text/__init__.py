"""Text to token ids, on the host's side: workers receive ids only.

This room opens a bundle's tokenizer within bounds, composes rows and pairs with the model's special tokens and renders
chat templates in a child process. It refuses what doesn't fit before anything is allocated or sent. It knows bundles
and limits, and neither lanes nor workers nor sockets. Short texts are read on the event loop's thread; the rest runs
beside it in daemon threads (`background`), at most so much at once over the whole process, and nobody waits for it past
a deadline. Start with `tokenizer.py`; `encoders.py` is what the host asks.
"""
