"""Everything a worker is, minus hardware: transport, request loop, dispatch, progress, artifact checks."""
