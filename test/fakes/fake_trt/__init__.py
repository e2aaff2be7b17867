"""What the fake ``tensorrt`` is made of. It runs the graph with ONNX Runtime on the CPU."""
