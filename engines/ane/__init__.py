"""Core ML on the Apple Neural Engine: fixed-shape functions, placement share, shape and packed admission."""
