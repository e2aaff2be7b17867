"""Networks as ONNX graphs, written from the published architectures; nothing at run time imports them."""
