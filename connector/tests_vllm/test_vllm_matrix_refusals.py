"""What vLLM can be asked for and the connector does not carry: refused at start, in one sentence.

Real configurations of vLLM, made by its own argument parser's dataclass; four engines are really
started, to see that the sentence reaches the log and the engine ends.
"""

import dataclasses
import json
import shutil
import types
import typing

import pytest
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybridpd_connector.vllm_compat import UnsupportedEngineError, check_engine, check_version
from hybridpd_geometry import KV_DTYPES
from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.engines import SHIPPED, EngineFailedError, EngineSpec, base_environment

NGRAM_CONFIG = {"method": "ngram", "num_speculative_tokens": 2}
PARTIAL_HITS = (
    *("--enable-prefix-caching", "--max-num-batched-tokens", "128"),
    *("--prefix-match-unit", "16"),
)
NEEDLESS = "unproven: nothing here needs fp8_on_gpu: it can be removed"
CARRIED = "hybrid_ngram is carried although no test has shown its tokens right"
NGRAM = ("--speculative-config", json.dumps(NGRAM_CONFIG))
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
]


def configuration(pool, monkeypatch, transfer=(), family="nemotron-h", **arguments):
    """A VllmConfig of a tiny checkpoint, Nemotron-H for one, with our connector."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    for name, value in base_environment().items():
        monkeypatch.setenv(name, value)
    settings = {
        "kv_connector": SHIPPED.name,
        "kv_connector_module_path": SHIPPED.module,
        "kv_role": "kv_producer",
        **dict(transfer),
    }
    arguments.setdefault("model", str(pool.checkpoint(family)))
    return EngineArgs(
        dtype=FAMILIES[family].dtype,
        max_model_len=1024,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(**settings),
        **arguments,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({}, "align"),
        ({"enable_prefix_caching": False}, "none"),
        ({"mamba_cache_mode": "align", "enable_prefix_caching": False}, "none"),
        ({"data_parallel_size": 2}, "align"),
        ({"async_scheduling": True}, "align"),
        ({"tensor_parallel_size": 2}, "align"),
    ],
    ids=str,
)
def test_vllm_matrix_refusals_do_not_touch_what_is_carried(pool, monkeypatch, arguments, mode):
    config = configuration(pool, monkeypatch, **arguments)
    assert check_engine(config, None).mamba_cache_mode == mode


@pytest.mark.parametrize(
    ("transfer", "arguments", "sentence"),
    [
        (
            {},
            {"pipeline_parallel_size": 2},
            r"pipeline_parallel_size: expected 1, got 2; use tensor parallelism",
        ),
        (
            {},
            {"disable_hybrid_kv_cache_manager": True},
            r"disable_hybrid_kv_cache_manager: expected off, got on; remove",
        ),
        (
            {"enable_permute_local_kv": True},
            {},
            r"enable_permute_local_kv: expected off, got on; pages are read as they lie",
        ),
    ],
)
def test_vllm_matrix_refusals_of_a_real_configuration(
    pool, monkeypatch, transfer, arguments, sentence
):
    config = configuration(pool, monkeypatch, transfer, **arguments)
    with pytest.raises(UnsupportedEngineError, match=sentence):
        check_engine(config, None)


# vLLM's CPU platform, or vLLM 0.32 itself, refuses these before a connector is asked. On a GPU or
# in another version it is: the configuration is changed after it was made.
@pytest.mark.parametrize(
    ("part", "field", "value", "sentence"),
    [
        ("cache_config", "mamba_cache_mode", "all", r"got all; set --mamba-cache-mode align"),
        ("cache_config", "use_replayssm", True, r"use_replayssm: expected off"),
        ("parallel_config", "decode_context_parallel_size", 2, r"context parallel.*tensor"),
        ("parallel_config", "prefill_context_parallel_size", 2, r"context parallel.*tensor"),
        ("model_config", "enable_sleep_mode", True, r"remove --enable-sleep-mode"),
        ("kv_transfer_config", "engine_id", "e" * 400, r"engine_id: expected 1 to 256"),
        ("cache_config", "calculate_kv_scales", True, r"remove --calculate-kv-scales"),
        ("parallel_config", "enable_fault_tolerance", True, r"remove --enable-fault-tolerance"),
        ("parallel_config", "enable_elastic_ep", True, r"remove --enable-elastic-ep"),
        ("model_config", "is_diffusion", True, r"cannot be handed over"),
    ],
)
def test_vllm_matrix_refusals_of_what_a_cpu_cannot_be_asked(
    pool, monkeypatch, part, field, value, sentence
):
    config = configuration(pool, monkeypatch)
    check_engine(config, None)
    object.__setattr__(getattr(config, part), field, value)
    with pytest.raises(UnsupportedEngineError, match=sentence):
        check_engine(config, None)


def test_vllm_matrix_refusals_of_experts_that_are_returned(pool, monkeypatch):
    """vLLM refuses it beside connectors of its own; 0.30 has the switch at the model."""
    config = configuration(pool, monkeypatch)
    holder = getattr(config, "aux_output_config", None) or config.model_config
    assert holder.enable_return_routed_experts is False
    object.__setattr__(holder, "enable_return_routed_experts", True)
    with pytest.raises(UnsupportedEngineError, match="remove --enable-return-routed-experts"):
        check_engine(config, None)


def carried_and_refused_kv_dtypes():
    """Every value of this vLLM's `--kv-cache-dtype`: a new one has to be looked at."""
    from vllm.config.cache import CacheDType

    names = typing.get_args(CacheDType)
    assert set(KV_DTYPES) <= set(names)
    return KV_DTYPES, sorted(set(names) - set(KV_DTYPES))


def test_vllm_matrix_refusals_of_caches_with_scales_of_their_own(pool, monkeypatch):
    """Scales made at run time, packed values, and layouts of one kernel only."""
    config = configuration(pool, monkeypatch)
    carried, others = carried_and_refused_kv_dtypes()
    assert {"fp8_per_token_head", "int8_per_token_head", "nvfp4", "fp8_ds_mla"} <= set(others)
    for name in carried:
        config.cache_config.cache_dtype = name
        check_engine(config, None)
    config.device_config.device_type = "cuda"
    for name in carried:
        config.cache_config.cache_dtype = name
        check_engine(config, None)
    for name in others:
        config.cache_config.cache_dtype = name
        with pytest.raises(UnsupportedEngineError, match=r"use --kv-cache-dtype bfloat16"):
            check_engine(config, None)


def test_vllm_matrix_refusals_know_of_no_scales_by_a_flag():
    """vLLM 0.30 and later have no `--calculate-kv-scales`; older configurations are refused."""
    from vllm.engine.arg_utils import EngineArgs

    assert "calculate_kv_scales" not in {field.name for field in dataclasses.fields(EngineArgs)}


def test_vllm_matrix_refusals_of_what_a_gpu_would_be_asked(pool, monkeypatch, caplog):
    """N-grams of a hybrid model: on a GPU carried in vLLM 0.32 without prefix caching, where they
    were seen; a setting carries them elsewhere there, and none does on a CPU."""
    from vllm import __version__
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    from hybridpd_connector.vllm_engine import tell_about_unproven

    unseen = "no test has shown its tokens right"
    plain = None if check_version(__version__) == (0, 32) else unseen
    forced, old = {"unproven": ["hybrid_ngram"]}, {"unproven": ["fp8_on_gpu"]}
    for extra, device, caching, kind, sentence in (
        ({}, "cuda", False, "MAMBA2", plain),
        (old, "cuda", False, "MAMBA2", plain),
        ({}, "cuda", True, "MAMBA2", unseen),
        ({}, "cuda", False, "SHORT_CONV", unseen),
        (forced, "cpu", False, "MAMBA2", "vLLM itself is wrong there"),
        (forced, "cuda", True, "SHORT_CONV", None),
    ):
        transfer = {"kv_connector_extra_config": extra}
        config = configuration(
            pool,
            monkeypatch,
            transfer,
            speculative_config=NGRAM_CONFIG,
            enable_prefix_caching=caching,
        )
        config.device_config.device_type = device
        state = MambaSpec(
            block_size=16, shapes=((4, 3),), dtypes=(config.model_config.dtype,),
            mamba_type=MambaAttentionBackendEnum[kind],
        )  # fmt: skip
        cache = types.SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], state)])
        if sentence is None:
            settings = check_engine(config, cache)
            assert settings.draft_method == "ngram"
            caplog.clear()
            with caplog.at_level("INFO", "hybridpd_connector"):
                tell_about_unproven(config, settings)
            said = {(): [], ("fp8_on_gpu",): [NEEDLESS]}.get(settings.unproven, [CARRIED])
            assert caplog.messages == said
            continue
        with pytest.raises(UnsupportedEngineError, match=sentence):
            check_engine(config, cache)


@pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])
def test_vllm_matrix_refusals_of_heads_that_draft(pool, monkeypatch, tmp_path, family):
    """Models that bring their own drafting layers, as vLLM reads them."""
    checkpoint = shutil.copytree(pool.checkpoint(family), tmp_path / family)
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    config = configuration(
        pool,
        monkeypatch,
        family=family,
        model=str(checkpoint),
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    assert config.speculative_config.method == "mtp"
    with pytest.raises(UnsupportedEngineError, match="a drafting model's cache is not handed over"):
        check_engine(config, None)


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3", "draft_model", "medusa"])
def test_vllm_matrix_refusals_of_drafting_models(pool, monkeypatch, method):
    config = configuration(pool, monkeypatch)
    object.__setattr__(config, "speculative_config", types.SimpleNamespace(method=method))
    with pytest.raises(UnsupportedEngineError, match=r"speculative_config.method: .*use ngram"):
        check_engine(config, None)


def test_vllm_matrix_refusals_of_offloading_by_vllm_itself(pool, monkeypatch):
    """--kv-offloading-size replaces the connector's name: vLLM ends at the module that lacks it."""
    with pytest.raises(AttributeError, match="OffloadingConnector not found in hybridpd_connector"):
        configuration(pool, monkeypatch, kv_offloading_size=1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("--pipeline-parallel-size", "2"), {}, "pipeline_parallel_size: expected 1, got 2"),
        (NGRAM, {}, "speculative_config: expected none for a hybrid model on a CPU"),
        (PARTIAL_HITS, {}, "prefix_match_unit: expected off, got on"),
        (
            (),
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "registered KV memory must not be remapped: remove the setting",
        ),
    ],
)
def test_vllm_matrix_refusals_end_the_engine(pool, arguments, environment, sentence):
    spec = EngineSpec(
        "refused",
        pool.checkpoint("nemotron-h"),
        role="kv_producer",
        arguments=arguments,
        environment=environment,
    )
    with pytest.raises(EngineFailedError, match="ended with exit code"), pool.own(spec):
        pytest.fail("the engine has started")
    assert sentence in pool.log_of("refused")
