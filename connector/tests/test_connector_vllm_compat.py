"""Engines that are refused, each in one sentence that names what to change."""

import types

import pytest

from hybridpd_connector.settings import SETTINGS
from hybridpd_connector.sum_board import MODES
from hybridpd_connector.vllm_compat import (
    HYBRID_NGRAM,
    PROVEN,
    EngineSettings,
    UnsupportedEngineError,
    check_allocator,
    check_cache_layout,
    check_choice,
    check_conv_layout,
    check_request_ids,
    check_seconds,
    check_setting_names,
    check_settings,
    check_side_channel_host,
    check_unproven,
    check_version,
    settings_of,
    unshown_of,
)
from hybridpd_connector.vllm_features import FEATURES, features_of

GOOD = {
    "version": "0.32.0",
    "role": "producer",
    "engine_id": "e",
    "tp_size": 2,
    "pp_size": 1,
    "context_parallel_size": 1,
    "mamba_cache_mode": "none",
    "replay_ssm": False,
    "hybrid_manager_disabled": False,
    "host_pools": False,
}


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0+cpu", "0.32.1rc1", "v0.33.0", "0.33"])
def test_supported_versions(version):
    assert check_version(version)[0] == 0


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "1.32.0", "dev", "", "0.3.2"])
def test_other_versions_are_refused(version):
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 0\.30 to 0\.33"):
        check_version(version)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments: true"]
)
def test_expandable_segments_are_refused(name, value):
    with pytest.raises(UnsupportedEngineError, match=name):
        check_allocator({name: value})


@pytest.mark.parametrize(
    "environment", [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"OTHER": "x"}]
)
def test_other_allocator_settings_pass(environment):
    check_allocator(environment)


def test_request_ids_as_clients_send_them_are_refused():
    name = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
    check_request_ids({})
    check_request_ids({name: "0"})
    with pytest.raises(UnsupportedEngineError, match=f"{name}: expected 0, got 1"):
        check_request_ids({name: "1"})


def test_conv_layouts():
    check_conv_layout("DS", has_state=True, tp_size=8)
    check_conv_layout("SD", has_state=True, tp_size=1)
    check_conv_layout("SD", has_state=False, tp_size=8)
    with pytest.raises(UnsupportedEngineError, match="VLLM_SSM_CONV_STATE_LAYOUT=DS"):
        check_conv_layout("SD", has_state=True, tp_size=2)
    with pytest.raises(UnsupportedEngineError, match="DS or SD"):
        check_conv_layout("XY", has_state=True, tp_size=1)


@pytest.mark.parametrize("layout", [None, "NHD", "LBNHC", "BLHNC"])
def test_other_cache_layouts_are_refused(layout):
    check_cache_layout("LBHNC")
    with pytest.raises(UnsupportedEngineError, match="LBHNC"):
        check_cache_layout(layout)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", "0.20.2", "vllm.version"),
        ("role", "None", "kv_role"),
        ("engine_id", "", "engine_id"),
        ("pp_size", 2, "pipeline_parallel_size"),
        ("context_parallel_size", 2, "context parallel"),
        ("mamba_cache_mode", "all", "mamba_cache_mode"),
        ("replay_ssm", True, "use_replayssm"),
        ("hybrid_manager_disabled", True, "disable_hybrid_kv_cache_manager"),
        ("host_pools", True, "host resident"),
        ("sleep_mode", True, "remove --enable-sleep-mode"),
        ("permutes_cache", True, "enable_permute_local_kv"),
        ("draft_method", "mtp", r"speculative_config\.method.*use ngram"),
        ("kv_dtype", "fp8_per_token_head", r"kv_cache_dtype.*use --kv-cache-dtype bfloat16"),
        ("kv_dtype", "nvfp4", "scales made at run time are not handed over"),
        ("scales_at_run_time", True, "remove --calculate-kv-scales"),
        ("features", ("enable_fault_tolerance",), "remove --enable-fault-tolerance"),
        ("features", ("enable_elastic_ep",), "enable_elastic_ep: expected off, got on"),
        ("features", ("enable_return_routed_experts",), "remove --enable-return-routed-experts"),
        ("features", ("prefix_match_unit",), "remove --prefix-match-unit"),
        ("features", ("is_diffusion",), "this model cannot be handed over"),
    ],
)
def test_settings_that_are_refused(field, value, words):
    check_settings(EngineSettings(**GOOD))
    with pytest.raises(UnsupportedEngineError, match=words):
        check_settings(EngineSettings(**{**GOOD, field: value}))


@pytest.mark.parametrize("unproven", [(), (HYBRID_NGRAM,)])
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("states", [(), ("MAMBA2",), ("GDN_ATTN",), ("SHORT_CONV",)])
def test_ngrams_of_hybrid_models(states, on_cpu, unproven):
    """Dense models take them, and Mamba2 on a GPU; others there when asked to. On a CPU, vLLM's own
    tokens are wrong: nothing carries them."""
    more = {"draft_method": "ngram", "state_types": states, "on_cpu": on_cpu, "unproven": unproven}
    settings = EngineSettings(**{**GOOD, **more})
    if not states or (not on_cpu and (unproven or states == ("MAMBA2",))):
        check_settings(settings)
        assert (unshown_of(settings) is not None) == bool(set(states) - {"MAMBA2"})
        return
    with pytest.raises(UnsupportedEngineError, match="remove --speculative-config"):
        check_settings(settings)


@pytest.mark.parametrize("unproven", [(), (HYBRID_NGRAM,), PROVEN])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"draft_method": "ngram_gpu"}, None),
        ({"version": "0.32.3"}, None),
        (
            {"draft_method": "suffix"},
            r"\.method: expected ngram or ngram_gpu .*got suffix; .*ngram",
        ),
        ({"mamba_cache_mode": "align"}, r"expected none where .*got align; .*-no-enable-prefix-ca"),
        (
            {"version": "0.31.0"},
            r"vllm\.version: expected 0\.32 .*got 0\.31; .*use an image",
        ),
        (
            {"version": "0.33.0"},
            r"vllm\.version: expected 0\.32 .*got 0\.33; .*use an image",
        ),
        (
            {"state_types": ("MAMBA2", "SHORT_CONV")},
            r"expected none for .* than MAMBA2, got ngram with SHORT_CONV; no test has shown",
        ),
        ({"draft_method": "mtp"}, None),
    ],
    ids=str,
)
def test_what_nobody_has_seen_of_ngrams_on_a_gpu_is_refused(changed, words, unproven):
    drafting = {**GOOD, "draft_method": "ngram", "state_types": ("MAMBA2",), "unproven": unproven}
    settings = EngineSettings(**{**drafting, **changed})
    if settings.draft_method == "mtp":
        with pytest.raises(UnsupportedEngineError, match="a drafting model's cache"):
            check_settings(settings)
    elif words is None or HYBRID_NGRAM in unproven:
        check_settings(settings)
        assert (unshown_of(settings) is None) == (words is None)
    else:
        with pytest.raises(UnsupportedEngineError, match=f"{words}.*remove --speculative-config"):
            check_settings(settings)


@pytest.mark.parametrize("unproven", [(), (HYBRID_NGRAM,), PROVEN])
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_fp8_caches_are_carried_and_scales_made_at_run_time_are_not(kv_dtype, on_cpu, unproven):
    """On either device, whatever is asked."""
    more = {"kv_dtype": kv_dtype, "on_cpu": on_cpu, "unproven": unproven}
    settings = EngineSettings(**{**GOOD, **more})
    if kv_dtype == "nvfp4":
        with pytest.raises(UnsupportedEngineError, match=r"got nvfp4; scales made at run time"):
            check_settings(settings)
    else:
        check_settings(settings)


@pytest.mark.parametrize("value", ["hybrid_ngram", None, ["mtp"], [[]], {"hybrid_ngram": True}])
def test_what_is_unproven_is_called_by_its_name(value):
    assert check_unproven([HYBRID_NGRAM]) == (HYBRID_NGRAM,)
    assert check_unproven(["fp8_on_gpu", HYBRID_NGRAM]) == ("fp8_on_gpu", HYBRID_NGRAM)
    assert check_unproven(()) == ()
    with pytest.raises(
        UnsupportedEngineError, match=r"unproven: expected a list of hybrid_ngram, got"
    ):
        check_unproven(value)


@pytest.mark.parametrize("version", ["0.30.0", "0.30.2+cpu", "0.31.0", "0.33.0"])
@pytest.mark.parametrize("states", [(), ("MAMBA2",), ("GDN_ATTN",), ("MAMBA2", "GDN_ATTN")])
def test_states_that_begin_wrong_are_refused(states, version):
    """vLLM 0.30 starts a prompt of one token of these models from a state of somebody else."""
    settings = EngineSettings(**{**GOOD, "version": version, "state_types": states})
    if version.startswith("0.30") and "GDN_ATTN" in states:
        with pytest.raises(UnsupportedEngineError, match=r"use an image with vLLM 0\.31 or later"):
            check_settings(settings)
    else:
        check_settings(settings)


def test_settings_are_read_from_vllms_configuration():
    def space(**values):
        return types.SimpleNamespace(**values)

    config = space(
        kv_transfer_config=space(kv_role="kv_both", engine_id="e"),
        parallel_config=space(tensor_parallel_size=2, pipeline_parallel_size=1),
        cache_config=space(mamba_cache_mode="align"),
        scheduler_config=space(disable_hybrid_kv_cache_manager=False),
    )
    cache = space(kv_cache_groups=[space(host_resident=False), space()])
    settings = settings_of(config, cache, "0.33.0")
    check_settings(settings)
    assert (settings.role, settings.mamba_cache_mode) == ("both", "align")


@pytest.mark.parametrize(
    ("part", "feature"),
    [
        ("parallel_config", "enable_fault_tolerance"),
        ("parallel_config", "enable_elastic_ep"),
        ("aux_output_config", "enable_return_routed_experts"),
        ("model_config", "enable_return_routed_experts"),
        ("model_config", "is_diffusion"),
    ],
)
def test_features_are_read_where_a_version_has_them(part, feature):
    off = types.SimpleNamespace(**dict.fromkeys(FEATURES, False))
    names = ("parallel_config", "model_config", "aux_output_config")
    config = types.SimpleNamespace(**dict.fromkeys(names, off))
    assert features_of(config, has_state=True) == ()
    assert features_of(types.SimpleNamespace(), has_state=True) == ()
    setattr(config, part, types.SimpleNamespace(**{feature: True}))
    assert features_of(config, has_state=False) == (feature,)


@pytest.mark.parametrize(
    ("unit", "caching", "has_state", "found"),
    [
        (16, True, True, ("prefix_match_unit",)),
        (16, False, True, ()),
        (None, True, True, ()),
        (128, True, False, ()),
    ],
)
def test_cached_prefixes_that_end_inside_of_a_block(unit, caching, has_state, found):
    cache = types.SimpleNamespace(prefix_match_unit=unit, enable_prefix_caching=caching)
    config = types.SimpleNamespace(cache_config=cache)
    assert features_of(config, has_state=has_state) == found


@pytest.mark.parametrize("value", [0, -1, 0.5, 86401, float("nan"), "30", None, True, [30]])
def test_durations_that_cannot_work_are_refused_at_start(value):
    with pytest.raises(UnsupportedEngineError, match="lease_seconds"):
        check_seconds("lease_seconds", value, 1, 86400)


@pytest.mark.parametrize("value", [1, 6.5, 86400])
def test_durations_that_work(value):
    assert check_seconds("lease_seconds", value, 1, 86400) == value


@pytest.mark.parametrize("value", ["", "ALL", "on", None, True, False, 1, ["all"]])
def test_a_checksum_mode_that_is_none_is_refused_at_start(value):
    with pytest.raises(UnsupportedEngineError) as caught:
        check_choice("checksum", value, MODES)
    assert caught.value.field == "kv_connector_extra_config.checksum"
    assert caught.value.expected == "off or sample or all"


@pytest.mark.parametrize("value", ["off", "sample", "all"])
def test_checksum_modes(value):
    assert check_choice("checksum", value, MODES) == value


def test_an_engine_id_that_no_peer_would_accept_is_refused():
    with pytest.raises(UnsupportedEngineError, match="engine_id"):
        check_settings(EngineSettings(**{**GOOD, "engine_id": "e" * 400}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "", "0:0:0:0:0:0:0:0"])
def test_a_side_channel_on_every_address_is_refused(host):
    with pytest.raises(UnsupportedEngineError, match=r"status\.podIP"):
        check_side_channel_host(host)


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1", "localhost", "fd00::7", "eth0", "pod-0"])
def test_a_side_channel_on_one_address_is_accepted(host):
    check_side_channel_host(host)


def test_every_known_setting_is_accepted_and_a_misspelt_one_named():
    check_setting_names({setting.name: setting.default for setting in SETTINGS})
    with pytest.raises(UnsupportedEngineError, match=r"lease_second.*did you mean lease_seconds\?"):
        check_setting_names({"lease_seconds": 30, "lease_second": 30})
    with pytest.raises(UnsupportedEngineError, match=r"num_threads.*remove it"):
        check_setting_names({"num_threads": 4})
