"""INetworkDefinition, its layers and tensors."""

from __future__ import annotations

from . import versions
from .dims import Dims, integer
from .enums import DataType, LayerType, NetworkDefinitionCreationFlag, TensorLocation
from .graph_facts import Facts, Layer, Tensor
from .logger import error

_KINDS = {
    "MATRIX_MULTIPLY": "MatMul Gemm",
    "SOFTMAX": "Softmax LogSoftmax",
    "CAST": "Cast",
    "CONVOLUTION": "Conv",
    "DECONVOLUTION": "ConvTranspose",
    "CONSTANT": "Constant",
    "SHAPE": "Shape Size",
    "SHUFFLE": "Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace SpaceToDepth",
    "GATHER": "Gather GatherElements GatherND",
    "CONCATENATION": "Concat",
    "SLICE": "Slice Split Expand Tile Pad",
    "TOPK": "TopK ArgMax ArgMin",
    "NON_ZERO": "NonZero",
    "POOLING": "MaxPool AveragePool GlobalAveragePool GlobalMaxPool",
    "ACTIVATION": "Relu Sigmoid Tanh LeakyRelu Elu Clip HardSigmoid Gelu Selu Softplus Softsign Celu Mish HardSwish",
    "UNARY": "Sqrt Exp Log Abs Neg Floor Ceil Round Erf Not Sin Cos Sign Reciprocal IsNaN IsInf Atan Tan",
    "ELEMENTWISE": "Add Sub Mul Div Pow Max Min And Or Xor Sum Mean Equal Less Greater LessOrEqual GreaterOrEqual Mod",
    "REDUCE": "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare",
    "SELECT": "Where",
    "FILL": "Range ConstantOfShape RandomUniform",
    "RESIZE": "Resize Upsample",
    "EINSUM": "Einsum",
    "SCATTER": "ScatterElements ScatterND",
    "GRID_SAMPLE": "GridSample",
    "ONE_HOT": "OneHot",
    "NMS": "NonMaxSuppression",
    "NORMALIZATION": "LayerNormalization InstanceNormalization GroupNormalization BatchNormalization LpNormalization",
    "CONDITION": "If",
    "IDENTITY": "Identity Dropout",
    "QUANTIZE": "QuantizeLinear",
    "DEQUANTIZE": "DequantizeLinear",
    "TRIP_LIMIT": "Loop",
    "CUMULATIVE" if versions.since(10, 13) else "LOOP_OUTPUT": "CumSum",
}
KINDS = {op: kind for kind, ops in _KINDS.items() for op in ops.split()}


class ITensor:
    """A tensor of the network; only its name can be changed here."""

    def __init__(self, fact: Tensor, is_input: bool, is_output: bool):
        self._fact, self._input, self._output = fact, is_input, is_output

    name = property(lambda self: self._fact.name)
    dtype = property(lambda self: DataType.__members__[self._fact.dtype])
    shape = property(lambda self: Dims(self._fact.shape))
    is_shape_tensor = property(lambda self: self._fact.is_shape)
    is_execution_tensor = property(lambda self: not self._fact.is_shape)
    is_network_input = property(lambda self: self._input)
    is_network_output = property(lambda self: self._output)
    location = property(lambda self: TensorLocation.HOST if self._fact.is_shape else TensorLocation.DEVICE)


class ILayer:
    """A layer; up to TensorRT 10 its precision and the types of its outputs can be set in a weakly typed network."""

    def __init__(self, network: INetworkDefinition, layer: Layer):
        self._network, self._layer, self._precision, self._output_types = network, layer, None, {}
        self.name = layer.name

    type = property(lambda self: LayerType.__members__[KINDS[self._layer.op]])
    num_inputs = property(lambda self: len(self._layer.inputs))
    num_outputs = property(lambda self: len(self._layer.outputs))

    def get_input(self, index):
        return self._network._tensor(self._layer.inputs[integer(index)])

    def get_output(self, index):
        return self._network._tensor(self._layer.outputs[integer(index)])

    def get_output_type(self, index):
        return self._output_types.get(index) or self.get_output(index).dtype

    if not versions.ELEVEN:

        @property
        def precision(self):
            return self._precision or DataType.FLOAT

        @precision.setter
        def precision(self, dtype):
            if self._network._allows("ILayer::setPrecision"):
                self._precision = _data_type(dtype)

        precision_is_set = property(lambda self: self._precision is not None)

        def reset_precision(self):
            self._precision = None

        def set_output_type(self, index, dtype):
            if self._network._allows("ILayer::setOutputType"):
                self._output_types[integer(index)] = _data_type(dtype)

        def output_type_is_set(self, index):
            return index in self._output_types

        def reset_output_type(self, index):
            self._output_types.pop(index, None)


class INetworkDefinition:
    """A network, filled by the parser."""

    def __init__(self, builder, flags: int):
        self.name = "Unnamed Network 0"
        self._builder, self._flags = builder, flags
        self._facts, self._graph = Facts([], [], []), b""
        self._layers: list[ILayer] = []

    builder = property(lambda self: self._builder)
    flags = property(lambda self: self._flags)
    num_inputs = property(lambda self: len(self._facts.inputs))
    num_outputs = property(lambda self: len(self._facts.outputs))
    num_layers = property(lambda self: len(self._layers))
    if not versions.ELEVEN:
        has_implicit_batch_dimension = property(lambda self: False)

    def get_flag(self, flag):
        return versions.ELEVEN and flag.name == "STRONGLY_TYPED" or bool(self._flags >> int(flag) & 1)

    def __len__(self):
        return len(self._layers)

    def __getitem__(self, index):
        return self._layers[index]

    def get_layer(self, index):
        return self._layers[integer(index)] if 0 <= index < len(self._layers) else None

    def get_input(self, index):
        return self._tensor(self._facts.inputs[index].name) if 0 <= integer(index) < self.num_inputs else None

    def get_output(self, index):
        return self._tensor(self._facts.outputs[index].name) if 0 <= integer(index) < self.num_outputs else None

    def _fill(self, facts: Facts, graph: bytes) -> None:
        self._facts, self._graph = facts, graph
        self._layers = [ILayer(self, layer) for layer in facts.layers]

    def _strong(self) -> bool:
        return self.get_flag(NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _allows(self, call: str) -> bool:
        if self._strong():
            error(f"{call}: Error Code 3: API Usage Error (not allowed in a strongly typed network)")
        return not self._strong()

    def _tensor(self, name: str) -> ITensor:
        facts = self._facts
        ends = {each.name: each for each in [*facts.inputs, *facts.outputs]}
        fact = ends.get(name) or Tensor(name, facts.types.get(name, "FLOAT"), [], [])
        return ITensor(fact, fact in facts.inputs, fact in facts.outputs)


def _data_type(value) -> DataType:
    if not isinstance(value, DataType):
        raise TypeError(f"incompatible function arguments: expected DataType, got {type(value).__name__}")
    return value
