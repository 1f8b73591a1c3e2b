"""Every process passes its piece of an array and gets it back, whatever the spec, and whatever mesh has such pieces."""

import itertools

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from started import IS_SOAK, count, grid, interleaved, own_piece, refused, require_equal

from partjit import Mesh, P, from_process_local, to_process_local

EVERY = 1 if IS_SOAK else 67


def _meshes():
    orders = (range(8), [4, 5, 6, 7, 0, 1, 2, 3], [0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 4, 2, 3, 5, 6, 7])
    for order, shape in itertools.product(orders, [(8,), (2, 4), (4, 2), (2, 2, 2)]):
        for permutation in itertools.permutations(range(len(shape))):
            yield Mesh(grid[[*order]].reshape(shape).transpose(permutation), ("x", "y", "z")[: len(shape)])


def _specs(mesh, rank):
    for dims in itertools.product(range(-1, rank), repeat=len(mesh.axis_names)):
        for names in {mesh.axis_names, mesh.axis_names[::-1]}:
            along = dict(zip(mesh.axis_names, dims, strict=True))
            yield P(*[tuple(name for name in names if along[name] == dim) for dim in range(rank)])


def _is_split_into_boxes(mesh):
    places = {}
    for index, device in np.ndenumerate(mesh.devices):
        places.setdefault(device.process_index, []).append(index)
    shapes = {tuple(np.ptp(found, axis=0) + 1) for found in places.values()}
    return len(shapes) == 1 and np.prod(shapes.pop()) == mesh.size // count


def check_that_pieces_come_back():
    cases = [(mesh, spec, rank) for mesh in _meshes() for rank in (1, 2) for spec in _specs(mesh, rank)]
    seen = {True: 0, False: 0}
    for mesh, spec, rank in cases[::EVERY]:
        value = np.arange(8.0**rank, dtype=np.float32).reshape((8,) * rank)
        sharding = NamedSharding(mesh, spec)
        array = jax.make_array_from_callback(value.shape, sharding, lambda index, value=value: value[index])
        seen[_is_split_into_boxes(mesh)] += 1
        if not _is_split_into_boxes(mesh):
            for call in (lambda: to_process_local(array), lambda: from_process_local(sharding, value)):  # noqa: B023
                assert "where its devices are a box of the mesh" in refused(call)
            continue
        piece = to_process_local(array)
        assert piece.is_fully_addressable
        np.testing.assert_array_equal(piece, own_piece(value, sharding))
        np.testing.assert_array_equal(piece, multihost_utils.global_array_to_host_local_array(array, mesh, spec))
        theirs = jax.make_array_from_process_local_data(sharding, np.asarray(piece))
        for back in (
            from_process_local(sharding, piece),
            from_process_local(sharding, np.asarray(piece)),
            from_process_local(sharding, value, value.shape),
            from_process_local(sharding, piece, value.shape),
            theirs,
        ):
            assert back.sharding == sharding
            require_equal(back, value)
    assert all(seen.values()), seen


def check_trees_and_keys():
    tree = {"x": np.ones((8, 2)), "y": [np.arange(8), 3]}
    arrays = from_process_local({"x": P("x"), "y": None}, tree)
    assert arrays["x"].shape == (8 * count, 2)
    assert arrays["y"][0].shape == (8,)
    jax.tree.map(np.testing.assert_array_equal, to_process_local(arrays), tree)
    shapes = {"x": (8 * count, 2), "y": [None, ()]}
    assert jax.tree.leaves(from_process_local({"x": P("x"), "y": None}, tree, shapes))[0].shape == (8 * count, 2)
    keys = jax.random.split(jax.random.key(0), 8)
    assert (to_process_local(from_process_local(P("x"), keys)) == keys).all()


def check_that_nothing_is_copied():
    piece = to_process_local(from_process_local(P("x"), np.arange(8.0)))
    again = to_process_local(from_process_local(P("x"), piece))
    pointers = [[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] for array in (piece, again)]
    assert pointers[0] == pointers[1]


def check_errors():
    text = refused(from_process_local, NamedSharding(interleaved, P("x")), np.ones(8))
    assert all(f"{[d.id for d in grid if d.process_index == k]} of process {k}" in text for k in range(count)), text
    assert "no piece of an array of the global_shape (24,)" in refused(from_process_local, P("x"), np.ones(8), (24,))
    assert "global_shape of local_data (float32[7])" in refused(from_process_local, P("x"), np.ones(8), (7,))
    assert "should be divisible by" in refused(from_process_local, P("y"), np.ones(3))
    others = [device for device in grid if device.process_index]  # of which process 0 has none
    sharding = NamedSharding(Mesh(others, "x"), P("x"))
    if jax.process_index() == 0:
        text = refused(from_process_local, sharding, np.ones(8))
        assert "process 0 has no piece of an array over a mesh without its devices" in text, text
