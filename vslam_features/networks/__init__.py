"""Networks as ONNX graphs, written from the published architectures (extra ``models``); nothing at run time imports them."""
