"""Layouts against torch.chunk of numbered parameters, and cases worked by hand."""

import numpy as np
import pytest
import torch
from brute import chunked, meshes, numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from headrace.errors import ConfigError
from headrace.reshard.box import Box
from headrace.reshard.layout import Layout, Mesh, describe, stages_of_layers


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
def test_a_mesh_splits_as_torch_chunks(data, shape):
    mesh = data.draw(meshes(8))
    order = data.draw(st.permutations(list(mesh.axes)))
    dims = {axis: data.draw(st.integers(0, len(shape) - 1)) for axis in mesh.axes if data.draw(st.booleans())}
    layout = Layout.on_mesh(
        {"w": (shape, torch.float32)}, mesh, {a: Shard(d) for a, d in dims.items()}, order=order, world=8
    )
    expected = chunked(shape, mesh, [(a, dims[a]) for a in order if a in dims])
    for rank in range(8):
        box = layout.box("w", rank)
        if rank not in expected:
            assert box is None
        else:
            assert np.array_equal(numbered(shape, box), expected[rank])


def test_zero3_after_tensor_parallelism():
    """8 rows, tp 2 then dp 2: tp rank 0 has rows 0-4, of which dp rank 0 has 0-2; rowwise both are cut."""
    described = {
        "up.weight": ((8, 6), torch.float32),
        "down.weight": ((8, 6), torch.float32),
        "norm": ((3,), torch.float32),
    }
    table = {"up.*": 0, "down.*": 1}
    layout = Layout.parallel(described, Mesh({"dp": 2, "tp": 2}), tp=table, zero3="dp")
    rows = [layout.box("up.weight", r) for r in range(4)]  # (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)
    assert [(b.start[0], b.stop[0]) for b in rows] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert layout.box("down.weight", 1) == Box((0, 3), (4, 6))
    assert [layout.box("norm", r).shape for r in range(4)] == [(2,), (2,), (1,), (1,)]


def test_layers_on_stages():
    layers = [f"model.layers.{i}.w" for i in range(3)]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight"]
    described = dict.fromkeys(names, ((4, 4), torch.float32))
    layout = Layout.parallel(described, Mesh({"pp": 2, "dp": 2}), stages=stages_of_layers([1, 2]))
    on = {name: [r for r in range(4) if layout.box(name, r) is not None] for name in described}
    assert on["model.embed_tokens.weight"] == on["model.layers.0.w"] == [0, 1]
    assert on["model.layers.1.w"] == on["model.layers.2.w"] == on["model.norm.weight"] == [2, 3]
    assert layout.bytes_held(2) == 3 * 64
    with pytest.raises(ConfigError, match="have no layer 2"):
        Layout.parallel(described, Mesh({"pp": 2}), stages=stages_of_layers([1, 1]))


def test_a_scalar_is_whole_everywhere():
    layout = Layout.parallel({"s": ((), torch.float32)}, Mesh({"dp": 2}), zero3="dp")
    assert layout.box("s", 1) == Box((), ())
    assert layout.bytes_held(1) == 4


def test_layouts_that_lie_alike_share_their_arrays():
    described = {f"p{i}": ((8, 4), torch.float32) for i in range(3)}
    layout = Layout.parallel(described, Mesh({"dp": 2}), zero3="dp")
    assert len({id(p.pieces) for p in layout.parameters.values()}) == 1


def test_names_and_ties_of_a_model():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert describe(model) == ({"0.weight": ((5, 3), torch.float32)}, {"1.weight": "0.weight"})


def test_one_process_without_torch_distributed():
    layout = Layout.of_model(torch.nn.Linear(2, 3))
    assert layout.world == 1
    assert layout.box("weight", 0) == Box((0, 0), (3, 2))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mesh({"dp": 2}, [0]), "needs 2 different ranks"),
        (lambda: Mesh({"dp": 2}, [1, 1]), "needs 2 different ranks"),
        (lambda: on({"dp": 2}, {"dp": Shard(2)}), "has no dimension to split"),
        (lambda: on({"dp": 2}, {"tp": Shard(0)}), "which mesh"),
        (lambda: on({"dp": 2}, {}, order=["tp"]), "must name each axis"),
        (lambda: on({"dp": 2}, {}, world=1), "not among 1 ranks"),
        (lambda: on({"dp": 2}, {}, stages=lambda name: [0]), "need an axis pp"),
    ],
)
def test_layouts_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def on(axes, placements, **more):
    return Layout.on_mesh({"w": ((4, 4), torch.float32)}, Mesh(axes), placements, **more)
