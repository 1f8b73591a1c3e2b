"""How each transformation of jax acts on the primitives: one file per transformation, registered when imported."""

from partjit.rules import batching, checkify, dce, jet, jvp, linearize, partial_eval, refs, transpose

__all__ = ["batching", "checkify", "dce", "jet", "jvp", "linearize", "partial_eval", "refs", "transpose"]
