"""Files in, files out: a whole corpus through one lane, in bounded memory, resumed after a stop.

`embed_file` reads, embeds and writes in step; `jsonl` reads the lines. It uses the facade like any caller. Start with
`embed_file.py`.
"""
