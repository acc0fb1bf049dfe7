"""Pallas Mosaic GPU kernels for Hopper."""


def refusal(x, projections, routing, dropout):
    return "not written yet"


def grouped_lora_linear_mosaic_gpu(*args):
    raise NotImplementedError
