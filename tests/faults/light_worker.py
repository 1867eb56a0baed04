"""The lightest worker there is: HELLO, LOADED, PONG and the exit, by the standard library (flags -I -S)."""

import json
import os
import socket
import struct
import sys


def main(argv):
    options = dict(zip(argv[::2], argv[1::2], strict=True))
    link = socket.socket(socket.AF_UNIX)
    link.connect(options["--socket"])

    def send(**message):
        data = json.dumps(message).encode()
        link.sendall(struct.pack("<I", len(data)) + data)

    stream = link.makefile("rb")

    def receive():
        head = stream.read(4)
        if len(head) < 4:
            os._exit(0)
        return json.loads(stream.read(struct.unpack("<I", head)[0]))

    engine = {"engine": "llama.cpp-worker", "version": "light", "build_flags": {"device": options["--device"]}}
    send(v=3, nonce=options["--nonce"], engine=engine, pid=os.getpid(), max_frame=65536)
    receive()
    while True:
        request = receive()
        kind = request["type"]
        if kind == "LOAD":
            send(type="LOADED", req_id=request["req_id"], model_ref="light:0", dims=4, cold_load_ms=0)
        elif kind == "PING":
            send(type="PONG", req_id=request["req_id"], rss_mb=1, models_loaded=1)
        elif kind == "UNLOAD":
            send(type="UNLOADED", req_id=request["req_id"])
        elif kind == "SHUTDOWN":
            return


main(sys.argv[1:])
