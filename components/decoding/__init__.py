"""The draft-verify loop, stop rules and acceptance metrics; no torch, no onnxruntime."""
