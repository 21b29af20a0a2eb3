"""Layouts and plans by brute force: every element of a parameter has a number, and is looked at one by one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from headrace.reshard.box import Box
from headrace.reshard.layout import Layout, Mesh, Parameter, pieces_from

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def numbered(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """The numbers, in row-major order over the whole parameter, of the elements of a box."""
    whole = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def elements(layout: Layout, name: str, rank: int) -> set[int]:
    box = layout.box(name, rank)
    return set() if box is None else set(numbered(layout.parameters[name].shape, box).ravel().tolist())


def chunked(shape, mesh: Mesh, splits: list[tuple[str, int]]) -> dict[int, np.ndarray]:
    """Rank → the numbers it holds, by torch.chunk of the numbered parameter, one mesh axis after the other."""
    found = {}
    for index, rank in enumerate(mesh.ranks):
        coordinate = dict(zip(mesh.axes, np.unravel_index(index, tuple(mesh.axes.values())), strict=True))
        part = torch.arange(int(np.prod(shape))).reshape(shape)
        for axis, d in splits:
            chunks = part.chunk(mesh.axes[axis], dim=d) if part.shape[d] else ()
            at = int(coordinate[axis])
            part = chunks[at] if at < len(chunks) else part.narrow(d, 0, 0)
        found[rank] = part.numpy()
    return found


@st.composite
def meshes(draw, world: int) -> Mesh:
    """A mesh of one to three axes over some of the ranks, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda n: np.prod(n) <= world))
    ranks = draw(st.permutations(range(world)))[: int(np.prod(sizes))]
    return Mesh({f"axis{i}": n for i, n in enumerate(sizes)}, ranks)


@st.composite
def on_meshes(draw, shapes: dict[str, tuple[int, ...]], world: int) -> Layout:
    """Every parameter with placements of its own on one mesh."""
    mesh = draw(meshes(world))
    chosen = {
        name: {
            axis: draw(st.sampled_from([Replicate(), *(Shard(d) for d in range(len(shape)))]))
            for axis in mesh.axes
        }
        for name, shape in shapes.items()
    }
    order = draw(st.permutations(list(mesh.axes)))
    dtype = draw(st.sampled_from(DTYPES))
    described = {name: (shape, dtype) for name, shape in shapes.items()}
    return Layout.on_mesh(described, mesh, chosen.__getitem__, order=order, world=world)


@st.composite
def any_boxes(draw, shapes: dict[str, tuple[int, ...]], world: int) -> Layout:
    """Ranks with any box of a parameter, overlapping others as it comes, an empty one, or none."""
    parameters = {}
    for name, shape in shapes.items():
        boxes = {}
        whole = draw(st.none() | st.integers(0, world - 1))  # without one, most sources would be incomplete
        for rank in range(world):
            if rank == whole:
                boxes[rank] = Box((0,) * len(shape), shape)
            elif draw(st.booleans()):
                edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
                boxes[rank] = Box(tuple(e[0] for e in edges), tuple(e[1] for e in edges))
        parameters[name] = Parameter(shape, draw(st.sampled_from(DTYPES)), pieces_from(boxes, shape, world))
    return Layout(world, parameters)


@st.composite
def pairs(draw) -> tuple[Layout, Layout, list[int] | None]:
    """(source, target, hosts or None)."""
    world = draw(st.integers(1, 8))
    few = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {f"p{i}": shape for i, shape in enumerate(draw(st.lists(few, min_size=1, max_size=3)))}
    source, target = (draw(st.one_of(on_meshes(shapes, world), any_boxes(shapes, world))) for _ in range(2))
    hosts = draw(st.none() | st.lists(st.integers(0, 2), min_size=world, max_size=world))
    return source, target, hosts
