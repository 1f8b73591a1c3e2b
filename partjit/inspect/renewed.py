"""Which results of a step are arguments anew, such as parameters and the state of an optimizer."""

from partjit.inspect.propagation import Partitioned
from partjit.inspect.why.key_paths import keys_of

__all__ = ["renewed_arguments"]


def renewed_arguments(partitioned: Partitioned) -> dict[int, int]:
    """For each result that is an argument anew, the position of the argument.

    It has the shape and the type of the argument, and a path that ends with all keys of that of the argument:
    `result[0]['w']` is `params['w']` anew. An argument without keys has no such result, and neither has one whose keys
    are numbers alone, unless the path of the result has more of them: a function of lists that returns a list may be
    anything.
    """
    tree, found = partitioned.tree, dict[int, int]()
    arguments: dict[object, int] = {}
    for k, value in enumerate(tree.inputs):
        if value.is_array and (keys := (keys_of(value.path or "") or ())[1:]):
            arguments.setdefault((value.aval.shape, value.aval.dtype, keys), k)
    for j, (path, value) in enumerate(zip(partitioned.unit.result_paths, tree.outputs, strict=True)):
        keys = (keys_of(path) or ())[1:] if value.is_array else ()
        for start in range(len(keys)):  # the longest end first
            own = keys[start:]
            k = arguments.get((value.aval.shape, value.aval.dtype, own))
            if k is not None and (start or not all(map(str.isdigit, own))):
                found[j] = k
                break
    return found
