"""From an ONNX file to an explained engine, and from an engine to outputs."""
