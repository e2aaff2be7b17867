"""A fake of ``cuda-python``, as far as a program of TensorRT needs it."""
