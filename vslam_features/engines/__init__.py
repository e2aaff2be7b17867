"""TensorRT engines from ONNX files: which build is right, the graph that it needs, and the build. Extra ``models``."""
