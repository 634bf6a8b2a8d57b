"""The contract with vLLM 0.30 to 0.33, read from the published packages without importing them.

What the connector overrides must exist with a signature that ours can take; what a version wants
must be there; what a version has and we leave alone is listed, so that a new hook is looked at.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

import hybridpd_connector
from hybridpd_connector.vllm_layers import PLAIN_ATTENTION
from hybridpd_testkit.vllm_sources import REQUIREMENTS, source_of

CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
OURS = Path(hybridpd_connector.__file__).parent

# Overridden hooks that not every version has: the first version that does.
SINCE = {"get_loaded_kv_cache_group_ids": "0.32", "supports_sleep_mode": "0.33"}

# Hooks that are right as the base class has them, and why.
LEFT_ALONE = {
    "role", "requires_kv_delivery", "bind_connector_metadata", "clear_connector_metadata",
    "has_connector_metadata", "_get_connector_metadata",  # plumbing of the base class
    "set_host_xfer_buffer_ops", "get_mem_pool_context",  # no staging memory
    "finish_forward", "reset_capture_state",  # nothing depends on the model's progress
    "get_block_ids_with_load_errors",  # block ids cannot name a failed hybrid load
    "get_kv_connector_kv_cache_events", "take_events",  # no events
    "bind_kv_cache_manager",  # binds the block pool
    "register_finished_partial_tail",  # no partial blocks are kept
    "has_pending_block_frees",  # vLLM steps while blocks are pinned
    "requires_piecewise_for_cudagraph",  # no work per layer
    "get_finished_count",  # every rank reports
    "set_xfer_handshake_metadata",  # the pp-aware one is overridden
    "reset_cache",  # keeps nothing
    "get_external_cache_hit_sources",  # the class attribute says it
    "unregister_kv_caches", "restore_kv_caches",  # sleep mode is refused
}  # fmt: skip

versions = pytest.mark.parametrize("version", list(REQUIREMENTS))


@cache
def parse(path):
    return ast.parse(path.read_text())


def module(version, name):
    return parse(source_of(version) / name)


def classes(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def methods(node):
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def fields(node):
    return {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}


def is_abstract(method):
    return any("abstractmethod" in ast.unparse(item) for item in method.decorator_list)


def decorations(method):
    names = {ast.unparse(item) for item in method.decorator_list}
    return names & {"classmethod", "property", "staticmethod"}


def parameters(method):
    """(positional names, takes **kwargs)"""
    arguments = method.args
    assert not arguments.kwonlyargs
    return [item.arg for item in arguments.args], arguments.kwarg is not None


@cache
def our_class():
    return methods(classes(parse(OURS / "connector.py"))["HybridNixlConnector"])


@cache
def base_class(version):
    found = classes(module(version, f"{CONNECTORS}/v1/base.py"))
    return {**methods(found["KVConnectorBase_V1"]), **methods(found["SupportsHMA"])}


def attributes_used(tree, name):
    """Attributes of the variable ``name``, and names given to ``getattr`` with it."""
    used = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
        ):
            used.add(node.attr)
    return used


def names_of(tree, class_name):
    """Everything that an instance of a class has: fields, methods, attributes of self."""
    node = classes(tree)[class_name]
    return fields(node) | set(methods(node)) | attributes_used(node, "self")


@versions
def test_every_required_method_is_there(version):
    required = {name for name, method in base_class(version).items() if is_abstract(method)}
    assert len(required) == 8
    assert required <= set(our_class())


@versions
def test_every_override_overrides_something(version):
    expected = {name for name in our_class() if SINCE.get(name, "0.30") <= version}
    own = {name for name in expected if name.startswith("_")}
    extra = {"request_finished_all_groups"}
    assert expected - own - extra <= set(base_class(version))


@versions
def test_signatures_fit(version):
    base = base_class(version)
    for name, ours in our_class().items():
        theirs = base.get(name)
        if theirs is None:
            continue
        assert decorations(ours) == decorations(theirs), name
        wanted, wants_more = parameters(theirs)
        taken, takes_more = parameters(ours)
        assert taken == wanted, name
        assert takes_more or not wants_more, name


@versions
def test_no_hook_is_overlooked(version):
    unknown = set(base_class(version)) - set(our_class()) - LEFT_ALONE
    assert unknown == set()


def test_no_hook_is_listed_in_vain():
    known = set().union(*(base_class(version) for version in REQUIREMENTS))
    assert known >= LEFT_ALONE


@versions
def test_results_have_a_channel_for_failed_loads(version):
    found = classes(module(version, f"{CONNECTORS}/v1/base.py"))
    assert fields(found["KVConnectorTransferResults"]) == {
        "finished_sending", "finished_recving", "failed_recving",
    }  # fmt: skip
    output = fields(classes(module(version, "vllm/v1/outputs.py"))["KVConnectorOutput"])
    used = attributes_used(parse(OURS / "connector.py"), "connector_output")
    assert used <= output
    assert "kv_connector_worker_meta" in output


@versions
def test_a_request_has_what_is_read_and_written(version):
    has = names_of(module(version, "vllm/v1/request.py"), "Request")
    used = attributes_used(parse(OURS / "connector.py"), "request")
    assert {"prompt_token_ids", "num_prompt_tokens", "max_tokens", "_all_token_ids"} <= used
    assert used <= has
    assert {"prompt_embeds", "mm_features", "cache_salt"} <= has
    statuses = classes(module(version, "vllm/v1/request.py"))["RequestStatus"]
    assigned = [item for item in statuses.body if isinstance(item, ast.Assign)]
    values = {ast.unparse(item.targets[0]) for item in assigned}
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= values


@versions
def test_the_cache_is_described_as_it_is_read(version):
    tree = module(version, "vllm/v1/kv_cache_interface.py")
    found = classes(tree)
    assert {"layers", "layer_stride", "block_stride", "offset"} <= fields(found["KVCacheTensor"])
    assert {"num_blocks", "kv_cache_tensors", "kv_cache_groups"} <= fields(found["KVCacheConfig"])
    assert {"layer_names", "kv_cache_spec"} <= fields(found["KVCacheGroupSpec"])
    assert {"shapes", "dtypes", "mamba_type", "num_speculative_blocks"} <= fields(
        found["MambaSpec"]
    )
    assert {"num_kv_heads", "head_size", "head_size_v", "dtype"} <= fields(found["AttentionSpec"])
    assert "page_size_bytes" in methods(found["KVCacheSpec"])


@versions
def test_what_tells_a_plain_cache_from_others_is_there(version):
    """A field that a version lacks would be taken for plain."""
    found = classes(module(version, "vllm/v1/kv_cache_interface.py"))
    lineage = ("AttentionSpec", "FullAttentionSpec", "MLAAttentionSpec")
    known = set().union(*(fields(found[name]) for name in lineage))
    wanted = {*PLAIN_ATTENTION, "cache_role"} - (
        {"storage_block_size"} if version > "0.31" else set()
    )
    assert wanted <= known
    assert "tp_replicated" in fields(found["MambaSpec"])


@versions
def test_orders_are_shown_before_the_model_runs(version):
    """Both runners show a step's metadata in ``handle_preemptions``, then bind it."""
    path = source_of(version) / "vllm/v1/worker/gpu/kv_connector.py"
    text = path.read_text()
    assert text.index(".handle_preemptions(") < text.index(".bind_connector_metadata(")
    runner = (source_of(version) / "vllm/v1/worker/gpu_model_runner.py").read_text()
    shown = runner.index(".handle_preemptions(")
    assert shown < runner.index("self.maybe_get_kv_connector_output(")
    mixin = source_of(version) / "vllm/v1/worker/kv_connector_model_runner_mixin.py"
    text = mixin.read_text()
    order = [".bind_connector_metadata(", ".start_load_kv(", ".get_transfer_results(",
             ".build_connector_worker_meta("]  # fmt: skip
    places = [text.index(call) for call in order]
    assert places == sorted(places)


@versions
def test_what_else_is_taken_from_vllm_is_there(version):
    factory = classes(module(version, f"{CONNECTORS}/factory.py"))["KVConnectorFactory"]
    assert parameters(methods(factory)["register_connector"])[0] == [
        "cls", "name", "module_path", "class_name",
    ]  # fmt: skip
    metrics = classes(module(version, f"{CONNECTORS}/v1/metrics.py"))
    assert set(methods(metrics["KVConnectorStats"])) >= {
        "reset", "aggregate", "reduce", "is_empty",
    }  # fmt: skip
    assert parameters(methods(metrics["KVConnectorPromMetrics"])["__init__"])[0] == [
        "self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues",
    ]  # fmt: skip
    mamba = module(version, "vllm/model_executor/layers/mamba/mamba_utils.py")
    assert any(
        isinstance(node, ast.FunctionDef) and node.name == "get_conv_state_layout"
        for node in mamba.body
    )
    environment = (source_of(version) / "vllm/envs.py").read_text()
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in environment
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in environment
    blocks = classes(module(version, "vllm/v1/core/kv_cache_manager.py"))["KVCacheBlocks"]
    assert "get_block_ids" in methods(blocks)
    cpu = (source_of(version) / "vllm/v1/attention/backends/cpu_attn.py").read_text()
    assert "layer.isa = self.isa" in cpu
    transfer = (source_of(version) / "vllm/config/kv_transfer.py").read_text()
    assert "kv_load_failure_policy" in transfer


@versions
def test_failures_are_joined_as_the_scheduler_half_expects(version):
    """A load has failed when all ranks have ended it and one of them failed."""
    text = (source_of(version) / f"{CONNECTORS}/utils.py").read_text()
    assert "failed_recving = self._failed_recving_pending & finished_recving" in text
    scheduler = (source_of(version) / "vllm/v1/core/sched/scheduler.py").read_text()
    assert "def _handle_failed_recving" in scheduler


@versions
def test_an_id_that_comes_again_ends_the_engine(version):
    """Why engines with request ids as clients send them are refused at start."""
    scheduler = (source_of(version) / "vllm/v1/core/sched/scheduler.py").read_text()
    assert 'is not None, "duplicate request id"' in scheduler
    environment = (source_of(version) / "vllm/envs.py").read_text()
    assert '"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"' in environment


def test_vllm_contract_ranks_are_asked_for_their_hello_when_graphs_are_recorded():
    """From that call on peers are met, on other threads, which must not happen while a GPU records.
    Of the installed version: engine/core.py is not among the files that are kept of the others."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    core = classes(parse(root / "v1/engine/core.py"))["EngineCore"]

    def calls(method):
        return [
            node.func.attr
            for node in ast.walk(methods(core)[method])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]

    in_order = [
        line.strip()
        for line in ast.unparse(methods(core)["__init__"]).splitlines()
        if "_initialize_kv_caches(" in line or "get_kv_connector_handshake_metadata(" in line
    ]
    assert ["_initialize_kv_caches" in line for line in in_order] == [True, False]
    assert "compile_or_warm_up_model" in calls("_initialize_kv_caches")
    assert "get_kv_connector_handshake_metadata" not in calls("_initialize_kv_caches")
