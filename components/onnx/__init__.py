"""Export to a bundle of ONNX graphs that share one KV cache, and the runtime that decodes with it."""
