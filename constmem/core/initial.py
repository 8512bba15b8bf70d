"""Initial weights that keep the size of what flows through them.

PyTorch's default shrinks a signal by three in variance with every linear layer, but not its biases:
behind a deep embedding all points look alike, and a model has to learn first that its context matters.
"""

from math import sqrt

from torch import nn


def keep_variance(layer: nn.Linear, *, gain: float = 1.0) -> nn.Linear:
    """Draw the weights from N(0, gain^2 / inputs), set the bias to zero, and return the layer."""
    nn.init.normal_(layer.weight, std=gain / sqrt(layer.in_features))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


RELU = sqrt(2.0)  # the gain that makes up for what a ReLU takes away
