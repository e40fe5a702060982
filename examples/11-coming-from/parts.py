"""The data and the model of all scripts in this folder."""

from torch import nn

from phalanx.zoo.data import load  # or any other data set of (image, label) pairs

train_data, val_data = load("digits"), load("digits", split="val")


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
