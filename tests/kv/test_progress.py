"""A rank's progress word: absolute, rising, and readable again."""

from __future__ import annotations

from pdx.kv.progress import end_value, layer_value, pass_and_layers


def test_each_value_is_above_the_one_before_and_tells_pass_and_layer() -> None:
    num_layers = 3
    before = 0
    for pass_idx in range(1, 4):
        for layer_idx in range(num_layers):
            value = layer_value(pass_idx, layer_idx, num_layers)
            assert value > before
            assert pass_and_layers(value, num_layers) == (pass_idx, layer_idx + 1)
            before = value
        end = end_value(pass_idx, num_layers)
        assert end > before
        assert pass_and_layers(end, num_layers) == (pass_idx + 1, 0), "all of it, and no layer more"
        before = end
