"""The machine under the fakes of ``tensorrt`` and ``cuda``: GPUs, memory, streams, graphs, and faults to order.

Memory of the device is memory of this process. Work on a stream waits until somebody synchronises, the latest moment
that CUDA allows, so that a missing synchronisation is seen as wrong numbers.
"""
