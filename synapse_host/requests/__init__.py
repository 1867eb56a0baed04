"""What a call becomes: one request, or several parts that are sent and joined again.

`embed`, `rerank` and `generate` build the messages of a lane's worker from rows of ids and turn replies into results;
`parts` cuts what is too large for a frame and puts answers back in the caller's order; `batching` joins the rows of
callers who wait for one lane; `generate` asks for a text slice by slice. Nothing here opens a file or knows which
process answers: a build is a function that a supervisor calls when it owns the stream. Start with `embed.py`.
"""
