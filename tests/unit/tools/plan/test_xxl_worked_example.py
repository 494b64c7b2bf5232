"""The XXL model: every published figure of the problem."""

from __future__ import annotations

import pytest

from paceline.tools.plan.devices_needed import ModelStates, device_nbytes
from paceline.tools.plan.xxl_worked_example import PARAMETERS, TOKEN_NBYTES, derive_figures


@pytest.fixture(scope="module")
def figures():
    return {each.key: each for each in derive_figures()}


def test_parameters_and_bytes(figures):
    assert PARAMETERS == 219_848_638_464
    assert figures["parameters"].shown == "219.85 G"
    assert figures["weights_nbytes"].value == figures["gradients_nbytes"].value == 4 * PARAMETERS
    assert round(figures["weights_nbytes"].value / 1e9) == 879
    assert int(figures["weights_nbytes"].value / 2**30) == 819
    assert figures["adam_nbytes"].value == 8 * PARAMETERS
    assert round(figures["state_nbytes"].value / 1e9) == 3518
    assert round(figures["state_nbytes"].value / 2**30) == 3276


def test_activations_of_a_token_and_the_slip_seen_elsewhere(figures):
    assert TOKEN_NBYTES == 17_547_264
    assert 17_543_808 % (2 * 126) != 0
    assert "17,543,808" in figures["token_nbytes"].wrong


@pytest.mark.parametrize(
    ("key", "count"),
    [("devices_80", 44), ("devices_95_0", 38), ("devices_95_1024", 41), ("devices_95_4096", 61)],
)
def test_devices(figures, key, count):
    assert figures[key].value == count


@pytest.mark.parametrize(("tokens", "count"), [(1024, 41), (4096, 61)])
def test_the_devices_fit_and_one_fewer_does_not(tokens, count):
    states, activations = ModelStates(16.0 * PARAMETERS), float(tokens * TOKEN_NBYTES)
    assert device_nbytes(states, activations, count, 0.5) < 95e9
    assert device_nbytes(states, activations, count - 1, 0.5) > 95e9


def test_dividing_all_activations_is_named_a_mistake_with_its_result(figures):
    assert "gives 38 devices" in figures["devices_95_1024"].wrong
    assert "101.8 GB" in figures["devices_95_1024"].wrong
    assert figures["devices_95_0"].wrong == ""


def test_tokens_from_which_forward_is_bound_by_computing(figures):
    assert round(figures["intensity"].value) == 2556
    assert round(figures["tokens_added"].value) == 1581
    assert round(figures["tokens_overlapped"].value) == 1278
    assert round(figures["tokens_device"].value) == 395
    assert figures["tokens_global_one"].shown == "25.3 k tokens"
    assert figures["tokens_global_at"].shown == "20.4 k tokens"
    assert "FSDP gathers the weights in each" in figures["tokens_added"].wrong


def test_every_figure_has_its_derivation(figures):
    assert len(figures) == len(derive_figures())
    for figure in figures.values():
        assert figure.what
        assert figure.formula
        assert figure.shown
