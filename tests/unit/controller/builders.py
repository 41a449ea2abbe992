"""Small builders, one per noun, so that a test says only what it is about."""

from trainer.contract.costs import LayerCost, LayerCosts


def costs_of(
    layers: int,
    forward: float = 0.004,
    backward: float = 0.008,
    parameter_bytes: int = 800_000,
    output_bytes: int = 130_000,
    micro_batch: int = 4,
) -> LayerCosts:
    layer = LayerCost(
        name="Block",
        forward_seconds=forward,
        backward_seconds=backward,
        parameter_bytes=parameter_bytes,
        output_bytes=output_bytes,
    )
    return LayerCosts(micro_batch=micro_batch, layers=(layer,) * layers)
