"""The nouns of frozen-mtp: data -> modeling -> decoding -> onnx -> devices -> release, on a small core."""
