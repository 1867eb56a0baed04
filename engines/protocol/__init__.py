"""Worker protocol v3: frames, messages and the state machine both ends run. No sockets, threads, clocks or numpy."""
