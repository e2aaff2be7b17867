"""Networks as ONNX graphs, written from the published architectures; needs the extra ``models``. Nothing at run time imports it."""
