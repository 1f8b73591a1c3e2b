# ruff: noqa: F401
"""Names that modules not yet moved to `partjit._jax` import; it goes with the last of them."""

import types

import jax
from jax.core import ShapedArray as _core_ShapedArray
from jax.core import Tracer as _core_Tracer
from jax.extend import source_info_util
from jax.extend.core import DropVar as _core_DropVar
from jax.extend.core import Effect as Effect
from jax.extend.core import Literal as _core_Literal
from jax.extend.core import Var as _core_Var
from jax.extend.core import check_jaxpr as _core_check_jaxpr
from jax.extend.core import jaxpr_as_fun as _core_jaxpr_as_fun
from jax.extend.core import jaxprs_in_params as _core_jaxprs_in_params
from jax.extend.core import new_jaxpr_eqn as _core_new_jaxpr_eqn
from jax.extend.sharding import GSPMDSharding as GSPMDSharding
from jax.interpreters import ad as jax_ad
from jax.interpreters import batching as jax_batching
from jax.interpreters import mlir as jax_mlir
from jax.interpreters import partial_eval as jax_pe
from jax.ref import AbstractRef as AbstractRef

from partjit._jax.arrays import ArrayImpl as ArrayImpl
from partjit._jax.arrays import PRNGKeyArray as PRNGKeyArray
from partjit._jax.arrays import array_of_buffers as array_of_buffers
from partjit._jax.arrays import array_of_capsule as alias
from partjit._jax.arrays import aval_of_struct as aval_of_struct
from partjit._jax.arrays import buffers_of as buffers_of
from partjit._jax.arrays import copies_of as copies_of
from partjit._jax.arrays import device_put as device_put
from partjit._jax.arrays import is_on_one_host_device as is_on_one_host_device
from partjit._jax.arrays import register_array_type as register_array_type
from partjit._jax.arrays import shareable as shareable
from partjit._jax.arrays import type_and_sharding as type_and_sharding
from partjit._jax.arrays import type_sharding_and_commitment as type_sharding_and_commitment
from partjit._jax.arrays import with_key_data as with_key_data
from partjit._jax.arrays import with_weak_type as with_weak_type
from partjit._jax.caches import register_cache as register_cache
from partjit._jax.caches import weakref_cache as weakref_cache
from partjit._jax.compiling import MLIR_BINDINGS as MLIR_BINDINGS
from partjit._jax.compiling import DeviceAssignmentMismatchError as DeviceAssignmentMismatchError
from partjit._jax.compiling import lower_to_computation as lower_to_computation
from partjit._jax.compiling import mismatches_inside as mismatches_inside
from partjit._jax.compiling import move_outputs as move_outputs
from partjit._jax.compiling import no_compilation_cache as no_compilation_cache
from partjit._jax.compiling import output_shardings as output_shardings
from partjit._jax.compiling import shard_constants as shard_constants
from partjit._jax.compiling import xla_warnings as xla_warnings
from partjit._jax.dispatch import USE_OF_DONATED_BUFFERS_CRASHES as USE_OF_DONATED_BUFFERS_CRASHES
from partjit._jax.dispatch import InternalFloatingPointError as InternalFloatingPointError
from partjit._jax.dispatch import PjitFunction as PjitFunction
from partjit._jax.dispatch import fast_path_data as fast_path_data
from partjit._jax.dispatch import is_profiled as is_profiled
from partjit._jax.dispatch import make_cpp_function as make_cpp_function
from partjit._jax.dispatch import recheck_for_nans as recheck_for_nans
from partjit._jax.dispatch import results_are_checked as results_are_checked
from partjit._jax.effects import has_kept_effects as kept_effects
from partjit._jax.effects import is_input_effect as is_input_effect
from partjit._jax.effects import positional_effects as effects_of
from partjit._jax.effects import register_effect as register_effect
from partjit._jax.effects import without_axes as without_axes
from partjit._jax.jaxprs import MERGED_JAXPR as MERGED_JAXPR
from partjit._jax.jaxprs import barrier as barrier
from partjit._jax.jaxprs import called_jaxpr as called_jaxpr
from partjit._jax.jaxprs import closed_jaxpr as closed_jaxpr
from partjit._jax.jaxprs import control_flow_kind as control_flow_of
from partjit._jax.jaxprs import is_rematerialized as is_rematerialized
from partjit._jax.jaxprs import nested_shardings as nested_shardings
from partjit._jax.jaxprs import new_var as new_var
from partjit._jax.jaxprs import scan_counts as scan_counts
from partjit._jax.lowering import add_manual_axes as _mlir_add_manual_axes
from partjit._jax.lowering import custom_call as _mlir_custom_call
from partjit._jax.lowering import lower_call as lower_call
from partjit._jax.lowering import lower_constraint as lower_constraint
from partjit._jax.lowering import lower_constraint_to as lower_constraint_to
from partjit._jax.lowering import lower_opaque as lower_opaque
from partjit._jax.meshes import EMPTY_MESH as EMPTY_MESH
from partjit._jax.meshes import AmbientMeshes as Meshes
from partjit._jax.meshes import entered_mesh as entered
from partjit._jax.meshes import innermost_mesh as innermost_mesh
from partjit._jax.meshes import manual_axes as manual_axes
from partjit._jax.meshes import physical_mesh as physical_mesh
from partjit._jax.meshes import under_mesh as ambient
from partjit._jax.meshes import without_mesh as without_mesh
from partjit._jax.processes import distributed_client as distributed_client
from partjit._jax.rules import batch_jaxpr as batch_jaxpr
from partjit._jax.rules import checkify_jaxpr as checked_jaxpr
from partjit._jax.rules import closed_call_partial_eval_custom_rule as _pe_closed_call_partial_eval_custom_rule
from partjit._jax.rules import discharge_jaxpr as discharge_jaxpr
from partjit._jax.rules import eqn_effects as _core_eqn_effects
from partjit._jax.rules import jvp_jaxpr as _ad_jvp_jaxpr
from partjit._jax.rules import move_binders_to_back as _pe_move_binders_to_back
from partjit._jax.rules import moveaxis as _batching_moveaxis
from partjit._jax.rules import new_effect_handle as _pe_EffectHandle
from partjit._jax.rules import new_eqn_recipe as _pe_new_eqn_recipe
from partjit._jax.rules import partial_eval_jaxpr_nounits_fwd as _pe_partial_eval_jaxpr_nounits_fwd
from partjit._jax.rules import prune_closed_jaxpr_outputs as _pe_prune_closed_jaxpr_outputs
from partjit._jax.rules import register_checkify as register_checkify
from partjit._jax.rules import register_dce as register_dce
from partjit._jax.rules import register_discharge as register_discharge
from partjit._jax.rules import register_printing as register_printing
from partjit._jax.rules import transpose_jaxpr as transpose_jaxpr
from partjit._jax.shard_maps import register_eager_in_shard_map as register_eager_in_shard_map
from partjit._jax.shard_maps import shard_map_body as shard_map_body
from partjit._jax.shard_maps import shard_map_p as shard_map_p
from partjit._jax.shard_maps import type_of_shape as type_of_shape
from partjit._jax.shard_maps import type_over_mesh as type_over_mesh
from partjit._jax.shard_maps import varying_axes as varying_axes
from partjit._jax.shard_maps import varying_type as varying
from partjit._jax.shardings import UNSPECIFIED as UNSPECIFIED
from partjit._jax.shardings import DeviceList as DeviceList
from partjit._jax.shardings import HloSharding as HloSharding
from partjit._jax.shardings import OpSharding as OpSharding
from partjit._jax.shardings import UnspecifiedValue as UnspecifiedValue
from partjit._jax.shardings import default_device as default_device
from partjit._jax.shardings import device_list as device_list
from partjit._jax.shardings import to_proto as to_proto
from partjit._jax.sources import is_user_file as is_user_file
from partjit._jax.sources import nested_source_info as nested_name
from partjit._jax.sources import source_site as source_site
from partjit._jax.sources import traced_at as standing_at
from partjit._jax.stages import JitParts as JitParts
from partjit._jax.stages import jit_parts as parts_of_jit
from partjit._jax.stages import make_args_info as _stages_make_args_info
from partjit._jax.threads import ThreadSettings as ThreadSettings
from partjit._jax.tracing import abstractify as abstractify
from partjit._jax.tracing import is_eager as is_eager
from partjit._jax.tracing import is_staged as is_staged
from partjit._jax.tracing import low_jaxpr as low_jaxpr
from partjit._jax.tracing import name_results as name_results
from partjit._jax.tracing import register_to_low as register_low
from partjit._jax.tracing import resolve_argnums as resolve_argnums
from partjit._jax.tracing import separate_consts as separate_consts
from partjit._jax.tracing import trace_context as trace_context
from partjit._jax.tracing import trace_state_clean as trace_state_clean
from partjit._jax.tracing import trace_to_jaxpr as trace_to_jaxpr
from partjit._jax.tracing import tree_prefix_errors as tree_prefix_errors
from partjit._jax.versions import supported_release as supported_release

current_source_info = source_info_util.current
core = types.SimpleNamespace(
    DropVar=_core_DropVar,
    Literal=_core_Literal,
    Var=_core_Var,
    check_jaxpr=_core_check_jaxpr,
    jaxpr_as_fun=_core_jaxpr_as_fun,
    jaxprs_in_params=_core_jaxprs_in_params,
    new_jaxpr_eqn=_core_new_jaxpr_eqn,
    ShapedArray=_core_ShapedArray,
    Tracer=_core_Tracer,
    Ref=jax.Ref,
    typeof=jax.typeof,
    eqn_effects=_core_eqn_effects,
)
pe = types.SimpleNamespace(
    closed_call_partial_eval_custom_rule=_pe_closed_call_partial_eval_custom_rule,
    move_binders_to_back=_pe_move_binders_to_back,
    new_eqn_recipe=_pe_new_eqn_recipe,
    partial_eval_jaxpr_nounits_fwd=_pe_partial_eval_jaxpr_nounits_fwd,
    prune_closed_jaxpr_outputs=_pe_prune_closed_jaxpr_outputs,
    EffectHandle=_pe_EffectHandle,
    JaxprTracer=jax_pe.JaxprTracer,
    PartialVal=jax_pe.PartialVal,
    custom_partial_eval_rules=jax_pe.custom_partial_eval_rules,
    partial_eval_jaxpr_custom_rules=jax_pe.partial_eval_jaxpr_custom_rules,
)
ad = types.SimpleNamespace(
    jvp_jaxpr=_ad_jvp_jaxpr,
    UndefinedPrimal=jax_ad.UndefinedPrimal,
    Zero=jax_ad.Zero,
    deflinear2=jax_ad.deflinear2,
    is_undefined_primal=jax_ad.is_undefined_primal,
    primitive_jvps=jax_ad.primitive_jvps,
    primitive_transposes=jax_ad.primitive_transposes,
)
batching = types.SimpleNamespace(
    moveaxis=_batching_moveaxis, fancy_primitive_batchers=jax_batching.fancy_primitive_batchers
)
mlir = types.SimpleNamespace(
    add_manual_axes=_mlir_add_manual_axes,
    custom_call=_mlir_custom_call,
    ir_tree_registry=jax_mlir.ir_tree_registry,
    lower_fun=jax_mlir.lower_fun,
    register_lowering=jax_mlir.register_lowering,
)
stages = types.SimpleNamespace(make_args_info=_stages_make_args_info)
