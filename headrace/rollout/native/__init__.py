"""headrace's own rollout engine: see `engine.NativeEngine`."""
