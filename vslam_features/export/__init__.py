"""PyTorch modules to checked ONNX files with a card; nothing at run time imports this. Extra ``export``."""
