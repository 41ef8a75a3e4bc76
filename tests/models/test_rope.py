"""Rotary frequencies and angles by the published formulas, scaled and unscaled."""

from __future__ import annotations

import math

import torch

from pdx.checkpoint.rope import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)
from pdx.models.rope import RotaryEmbedding, inverse_frequencies

D = 128
LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=8192)


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * i / D) for i in range(D // 2)]


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_unscaled() -> None:
    close(inverse_frequencies(RopeConfig(theta=5e5, scaling=None), D), plain(5e5))


def test_linear_divides_all() -> None:
    config = RopeConfig(theta=1e4, scaling=LinearScaling(factor=4.0))
    close(inverse_frequencies(config, D), [f / 4 for f in plain(1e4)])


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    expected = []
    regimes = set()
    for frequency in plain(5e5):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            regimes.add("kept")
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            regimes.add("divided")
            expected.append(frequency / 8)
        else:
            regimes.add("blended")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert regimes == {"kept", "divided", "blended"}
    close(inverse_frequencies(RopeConfig(theta=5e5, scaling=LLAMA31), D), expected)


def test_dynamic_ntk_changes_nothing_up_to_the_length_that_is_served() -> None:
    config = RopeConfig(theta=1e4, scaling=DynamicNtkScaling(factor=4.0))
    close(inverse_frequencies(config, D), plain(1e4))


def test_yarn_keeps_fast_turns_divides_slow_ones_and_blends_between() -> None:
    # Qwen3's numbers. A frequency's turns within the original context decide; the blend is linear
    # in the frequency's index, between whole indices.
    yarn = YarnScaling(
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=1.0,
        original_len=32768,
    )
    frequencies = plain(1e6)
    turns = [32768 * f / (2 * math.pi) for f in frequencies]
    first = max(i for i, n in enumerate(turns) if n >= 32)
    last = min(i for i, n in enumerate(turns) if n <= 1)
    assert 0 < first < last < D // 2
    expected = []
    for i, frequency in enumerate(frequencies):
        divided = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append((1 - divided) * frequency + divided * frequency / 4)
    close(inverse_frequencies(RopeConfig(theta=1e6, scaling=yarn), D), expected)


def test_yarn_lengthens_rotated_vectors() -> None:
    yarn = YarnScaling(
        factor=2.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=1.5,
        original_len=64,
    )
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4, scaling=yarn), 8)(torch.tensor([0, 7]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((2, 4), 1.5**2))


def test_angles_of_positions() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=1e4, scaling=None), 4)
    cos, sin = rotary(torch.tensor([0, 3]))
    angles = torch.tensor([[0.0, 0.0], [3.0, 0.03]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_frequencies_are_no_parameter_and_exist_where_the_model_is_made_empty() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig(theta=1e4, scaling=None), 4)
    assert list(rotary.parameters()) == []
    assert rotary.state_dict() == {}
    assert rotary.get_buffer("inv_freq").device.type == "cpu"
