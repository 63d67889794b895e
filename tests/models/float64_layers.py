"""The layers of the papers in float64 and plain loops, for one row at a time. Tests compare the models with them."""

import math

import numpy as np


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    for i, token in enumerate(x):
        mean = sum(token) / len(token)
        variance = sum((value - mean) ** 2 for value in token) / len(token)
        out[i] = [
            (value - mean) / math.sqrt(variance + 1e-5) * g + b for value, g, b in zip(token, gain, bias, strict=True)
        ]
    return out


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), len(weight)))
    for i, token in enumerate(x):
        for o, (weights, b) in enumerate(zip(weight, bias, strict=True)):
            out[i, o] = sum(w * value for w, value in zip(weights, token, strict=True)) + b
    return out


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([[value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in token] for token in x])


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """One head; bias[i, j] is added to the score of key j for query i."""
    out = np.zeros_like(v)
    for i in range(len(q)):
        scores = [sum(q[i] * k[j]) / math.sqrt(q.shape[1]) + bias[i, j] for j in range(len(k))]
        for j, weight in enumerate(softmax(scores)):
            out[i] += weight * v[j]
    return out


def numbers(module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
