"""A program that is no transformer: a convolutional network learns to read handwritten digits.

It imports nothing of Varuna's. See digits.yaml beside it.
"""

import numpy
import torch
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 297  # of 1,797 images


class Residual(nn.Module):
    """Two convolutions beside a shortcut. GroupNorm: BatchNorm would mix the samples of a batch."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.body(x)


def layers(args):
    channels = args.get("channels", 16)
    return [
        nn.Conv2d(1, channels, 3, padding=1),
        Residual(channels),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 1)),
        Residual(2 * channels),
        nn.Sequential(nn.GroupNorm(4, 2 * channels), nn.Flatten(), nn.Linear(32 * channels, 10)),
    ]


class Digits:
    """Images of 8 x 8 and the digit that each shows; ``shift``: moved by a pixel at random."""

    def __init__(self, places, shift):
        digits = load_digits()
        self.images = (digits.images[places] / 16).astype(numpy.float32)
        self.labels = digits.target[places]
        self.shift = shift

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.shift:  # drawn from a generator that Varuna seeds for each sample
            image = numpy.roll(image, numpy.random.randint(-1, 2, size=2), axis=(0, 1))
        return {"image": torch.from_numpy(image[None].copy()), "label": self.labels[index]}


def dataset(args):
    return Digits(slice(None, -HELD_OUT), shift=args.get("shift", True))


def eval_dataset(args):
    return Digits(slice(-HELD_OUT, None), shift=False)


def inputs(batch):
    return batch["image"]


def loss(output, batch):
    losses = nn.functional.cross_entropy(output, batch["label"], reduction="sum")
    right = (output.argmax(1) == batch["label"]).sum()
    count = len(output)
    return losses, count, {"accuracy": (right, count)}


def lr_scale(step, args):
    return min(1.0, step / 10)
