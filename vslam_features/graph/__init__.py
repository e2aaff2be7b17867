"""Passes over ONNX graphs, whichever model they are of."""
