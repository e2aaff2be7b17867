"""A small matcher with a covisibility score a layer, as an ONNX graph and in NumPy, with and without the stop rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, argument

from vslam_features.networks.layers import finish


def _softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@dataclass
class Matcher:
    """``layers`` of self and cross attention, weights shared between the two sets of tokens.

    The tokens move towards what they attend to; the score of a layer is a logistic function of the products of both
    sets' means, and, as in FlexGlue, a covisibility below ``min_covisibility`` leaves no match. ``sharpness``: of the
    similarities that match scores are made of; at 1 none of many keypoints has one that the host takes for a match.
    """

    layers: int = 9
    dim: int = 16
    seed: int = 0
    score_shape: tuple[int, ...] = ()
    sharpness: float = 1
    weights: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        d = self.dim
        sizes = {"in": (d, d), "shared": (d,)}  # the latter is read by every layer
        for k in range(1, self.layers + 1):
            sizes |= {f"{k}.{kind}.{w}": (d, d) for kind in ("self", "cross") for w in "qkvo"}
            sizes |= {f"{k}.up": (d, 2 * d), f"{k}.down": (2 * d, d), f"{k}.score": (d,)}
        self.weights = {n: rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for n, s in sizes.items()}
        self.bias = rng.uniform(0.5, 2, self.layers + 1).astype(np.float32)

    def pair(self, m: int, n: int, seed: int, overlap: bool = True) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        x0, x1 = rng.normal(size=(m, self.dim)), rng.normal(size=(n, self.dim))
        shared = min(m, n) // 2 if overlap else 0
        x1[:shared] = x0[rng.permutation(m)[:shared]] + rng.normal(0, 0.05, (shared, self.dim))
        return {"descriptors0": x0.astype(np.float32), "descriptors1": x1.astype(np.float32)}

    # -- NumPy -----------------------------------------------------------------------------------

    def scores(self, pair: dict, dtype=np.float64) -> tuple[list[float], np.ndarray, np.ndarray]:
        """Score of each layer, and the tokens after the last."""
        w = {name: value.astype(dtype) for name, value in self.weights.items()}
        x = [pair[f"descriptors{i}"].astype(dtype) @ w["in"] for i in (0, 1)]
        found = []
        for k in range(1, self.layers + 1):
            for kind in ("self", "cross"):
                q, key, v, o = (w[f"{k}.{kind}.{name}"] for name in "qkvo")
                other = x if kind == "self" else x[::-1]
                attention = [_softmax((a @ q) @ (b @ key).T / dtype(self.dim) ** 0.5) for a, b in zip(x, other)]
                x = [a + dtype(0.3) * (p @ (b @ v)) @ o for a, b, p in zip(x, other, attention)]
            x = [a + dtype(0.3) * np.tanh(a @ w[f"{k}.up"]) @ w[f"{k}.down"] * w["shared"] for a in x]
            logit = (x[0].mean(0) * x[1].mean(0) * 20 * w[f"{k}.score"]).sum()
            found.append(1 / (1 + np.exp(-2 * np.tanh(logit) - dtype(self.bias[k]))))
        return found, *x

    def match(self, pair: dict, min_covisibility: float, decay: float, checked=(), dtype=np.float64):
        """matches0, mscores0, covisibility_score, stopped_after_layer, layer_scores by the rule."""
        scores, x0, x1 = self.scores(pair, dtype)
        seen = np.full(len(checked), -1.0)
        for i, k in enumerate(checked):
            seen[i] = scores[k - 1]
            if not scores[k - 1] >= min_covisibility * (1 - decay) ** (self.layers - k):
                return np.full(len(x0), -1), np.zeros(len(x0)), scores[k - 1], k, seen
        similarity = x0 @ x1.T * dtype(self.sharpness)
        best0, best1 = similarity.argmax(1), similarity.argmax(0)
        mutual = (best1[best0] == np.arange(len(x0))) & ~(scores[-1] < min_covisibility)
        probability = (_softmax(similarity) * _softmax(similarity.T).T).max(1)
        return np.where(mutual, best0, -1), np.where(mutual, probability, 0), scores[-1], 0, seen

    # -- ONNX ------------------------------------------------------------------------------------

    def graph(self, score_outputs: bool = True, min_covisibility: bool = True) -> onnx.ModelProto:
        """Outputs ``matches0``, ``mscores0``, ``covisibility_score`` and the scores ``score_1``, ...

        Without ``score_outputs`` the latter are inner values of these names.
        """

        def const(value, dtype=np.float32):
            return op.const(np.asarray(value, dtype))

        def turned(a):
            return op.transpose(a, perm=[1, 0])

        w = {name: const(value) for name, value in self.weights.items()}
        inputs = {f"descriptors{i}": argument(Tensor(np.float32, (n, self.dim))) for i, n in enumerate("MN")}
        if min_covisibility:
            inputs["min_covisibility"] = argument(Tensor(np.float32, ()))
        x = [op.matmul(inputs[f"descriptors{i}"], w["in"]) for i in (0, 1)]
        outputs = {}
        for k in range(1, self.layers + 1):
            for kind in ("self", "cross"):
                q, key, v, o = (w[f"{k}.{kind}.{name}"] for name in "qkvo")
                moved = []
                for a, b in zip(x, x if kind == "self" else x[::-1]):
                    logits = op.matmul(op.matmul(a, q), turned(op.matmul(b, key)))
                    weight = op.softmax(op.div(logits, const(self.dim**0.5)))
                    message = op.matmul(op.matmul(weight, op.matmul(b, v)), o)
                    moved.append(op.add(a, op.mul(const(0.3), message)))
                x = moved
            for i, a in enumerate(x):
                h = op.matmul(op.tanh(op.matmul(a, w[f"{k}.up"])), w[f"{k}.down"])
                x[i] = op.add(a, op.mul(op.mul(const(0.3), h), w["shared"]))
            means = op.mul(*(op.reduce_mean(a, const([0], np.int64), keepdims=0) for a in x))
            logit = op.reduce_sum(op.mul(op.mul(means, const(20)), w[f"{k}.score"]), keepdims=0)
            score = op.sigmoid(op.add(op.mul(const(2), op.tanh(logit)), const(self.bias[k])))
            outputs[f"score_{k}"] = op.reshape(score, const(self.score_shape, np.int64))
        similarity = op.matmul(x[0], turned(x[1]))
        if self.sharpness != 1:
            similarity = op.mul(similarity, const(self.sharpness))
        best0, best1 = (op.arg_max(similarity, axis=axis, keepdims=0) for axis in (1, 0))
        rows = op.range(const(0, np.int64), op.size(best0), const(1, np.int64))
        mutual = op.equal(op.gather(best1, best0), rows)
        covisibility = op.identity(outputs[f"score_{self.layers}"])
        if min_covisibility:
            mutual = op.and_(mutual, op.not_(op.less(covisibility, inputs["min_covisibility"])))
        product = op.mul(op.softmax(similarity), op.softmax(similarity, axis=0))
        probability = op.reduce_max(product, const([1], np.int64), keepdims=0)
        results = {
            "matches0": op.where(mutual, best0, const(-1, np.int64)),
            "mscores0": op.where(mutual, probability, const(0)),
            "covisibility_score": covisibility,
        }
        model = finish("matcher", inputs, results | outputs)
        if not score_outputs:
            for name in outputs:
                model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
        return model
