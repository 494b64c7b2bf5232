"""Names in DCP files are those of torch's own: the same keys, and the same nested state out of them."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import paceline
from paceline.checkpoint.parts.dcp_names import DcpNames, dcp_values
from paceline.world.plain_values import pack
from same_states import difference

VALUES = st.one_of(
    st.none(), st.integers(), st.just(torch.ones(2)), st.text(max_size=3), st.just((1, torch.ones(1)))
)
KEYS = st.one_of(st.integers(0, 3).map(str), st.text("ab", min_size=1, max_size=2))
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        VALUES,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3), st.dictionaries(KEYS, inner, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def names_of(optimizers, others, plain):
    """Return the paths of all names, and the names of tensors by those in DCP files."""
    find = DcpNames((), optimizers, others)
    find.add_values(plain)
    values = dcp_values(optimizers, others, plain, lambda label: torch.ones(1))
    assert not values.keys() & find.aliases.keys()
    return {name: find.path(name) for name in [*values, *find.aliases]}, find.aliases


@settings(max_examples=300)
@given(STATES)
def test_a_nested_state_has_the_names_and_paths_of_torch(state):
    flat, expected = flatten_state_dict({"thing": state})
    packed, tensors = pack(state, "rank.0.others.thing")
    paths, aliases = names_of({}, {"thing": packed}, {})
    assert paths == expected
    assert {name for name, value in flat.items() if isinstance(value, torch.Tensor)} == set(aliases)
    assert set(aliases.values()) <= set(tensors)


@settings(max_examples=200)
@given(STATES)
def test_values_of_optimizer_states_have_the_names_and_paths_of_torch(state):
    _, expected = flatten_state_dict({"optimizer": {"state": {"net.weight": state}}})
    plain = {}
    for key, value in state.items():
        name = f"optimizer.state.net.weight.{key}"
        plain[name] = pack(value, name)[0]
    group = {"params": ["net", "net.weight"]}
    paths, _ = names_of({"optimizer": [group]}, {}, plain)
    assert paths.pop("optimizer.param_groups.0.params") == ("optimizer", "param_groups", 0, "params")
    assert paths == expected


def test_paths_of_weights_and_states():
    groups = {"optimizer": [{"params": ["a.b", "a.b.c"], "lr": 1.0}]}
    state = {"milestones": Counter({2: 1}), "each": [{"last": 1}, {"last": 2}]}
    find = DcpNames(["model"], groups, {"scheduler": pack(state)[0]}).path
    assert find("model.a.b.c") == ("model", "a.b.c")
    assert find("optimizer.state.a.b.exp_avg") == ("optimizer", "state", "a.b", "exp_avg")
    assert find("optimizer.state.a.b.c.exp_avg") == ("optimizer", "state", "a.b.c", "exp_avg")
    assert find("optimizer.param_groups.0.lr") == ("optimizer", "param_groups", 0, "lr")
    assert find("scheduler.milestones.2") == ("scheduler", "milestones", "2")
    assert find("scheduler.each.1.last") == ("scheduler", "each", 1, "last")
    assert find("rank.0.random.torch") == ("rank", "0", "random", "torch")


class Nested(torch.optim.SGD):
    """Keeps lists and dicts of tensors and numbers."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] |= {
                    "factors": [param.detach() * 2, {"inverse": param.detach() / 2}],
                    "count": 3,
                    "ends": [1, 2],
                }


def schedules(optimizer):
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3), steps], milestones=[4]
    )


class Odd:
    """Its state has keys of every kind."""

    def state_dict(self):
        return OrderedDict(
            {"lists": [[torch.ones(1)], [2]], "pair": (torch.zeros(2), 1), 7: {"x": None}, "several": [1, 2]}
        )

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_file_made_of_a_checkpoint_is_the_one_that_torch_makes(tmp_path, asynchronous):
    """`dcp_to_torch_save` of what we have saved, and of what torch has saved of the same objects."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = Nested(
        [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}], lr=0.125, momentum=0.9
    )
    schedule, odd = schedules(optimizer), Odd()
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    schedule.step()
    with paceline.Checkpoint(
        tmp_path / "run", net, optimizer, schedule=schedule, odd=odd, format="dcp", asynchronous=asynchronous
    ) as checkpoint:
        checkpoint.save(wait=True)
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "schedule": schedule.state_dict(),
        "odd": odd.state_dict(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: it runs in one process
        dcp.save(state, checkpoint_id=tmp_path / "theirs")
    files = []
    for folder in (tmp_path / "run" / "step-00000000", tmp_path / "theirs"):
        dcp_to_torch_save(folder, tmp_path / f"{folder.name}.pt")
        files.append(torch.load(tmp_path / f"{folder.name}.pt", weights_only=False))
    ours, theirs = files
    ours = {name: ours[name] for name in theirs}
    for one, two in zip(ours["optimizer"]["param_groups"], theirs["optimizer"]["param_groups"], strict=True):
        assert sorted(one["params"]) == sorted(two["params"])
        one["params"] = two["params"]
    drop_lists_of_tensors(ours["optimizer"]["state"])
    assert difference(ours, theirs) == ""


def drop_lists_of_tensors(state):
    """Our files have the tensors inside of lists under names of their own, too."""
    for entry in state.values():
        for key in [key for key in entry if "[" in key]:
            del entry[key]
