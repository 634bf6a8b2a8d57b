"""Stats: plain data, added up over ranks, and the metric names that dashboards rely on."""

import json

import pytest

from hybridpd_connector import stats
from hybridpd_connector.metric_samples import samples
from hybridpd_connector.stats import METRICS, Stats, aggregate, empty, is_empty, reduce


def filled(loads=1):
    recorder = Stats()
    recorder.count(stats.LOADS, loads)
    recorder.count(stats.READ_BYTES, 1000)
    recorder.fail("lease_ended")
    recorder.observe(stats.POST_SECONDS, 0.001)
    recorder.set_gauge(stats.LEASES_HELD, 4)
    recorder.set_peers({"ready": 2})
    return recorder


def test_taking_starts_over():
    recorder = filled()
    assert not recorder.is_empty()
    taken = recorder.take()
    assert recorder.is_empty()
    recorder.count(stats.LOADS)
    recorder.observe(stats.POST_SECONDS, 0.002)
    recorder.set_peers({"ready": 3})
    assert taken["counts"] == {"loads": 1, "read_bytes": 1000}
    assert (taken["seconds"], taken["peers"]) == ({"post_seconds": [0.001]}, {"ready": 2})
    assert Stats(taken).data is taken


def test_data_is_json():
    data = filled().data
    assert json.loads(json.dumps(data)) == data


def test_ranks_add_up_and_gauges_do_not():
    ours, theirs = filled(loads=1).data, filled(loads=2).data
    theirs["gauges"]["leases_held"] = 3
    theirs["peers"] = {"ready": 1, "refused": 1}
    joined = aggregate(ours, theirs)
    assert joined is ours
    assert joined["counts"] == {"loads": 3, "read_bytes": 2000}
    assert joined["failures"] == {"lease_ended": 2}
    assert joined["seconds"] == {"post_seconds": [0.001, 0.001]}
    assert joined["gauges"] == {"leases_held": 4}
    assert joined["peers"] == {"ready": 2, "refused": 1}


def test_the_slowest_rank_speaks_for_a_link():
    ours, theirs = Stats(), Stats()
    ours.set_links({"a:1": ("cuda_ipc", 9e10), "b:1": ("tcp", 4e8)})
    theirs.set_links({"a:1": ("tcp", 5e8), "b:1": ("rdma", 2e10), "c:1": ("", 0.0)})
    assert not ours.is_empty()
    joined = aggregate(ours.data, json.loads(json.dumps(theirs.data)))
    assert joined["links"] == {"a:1": ["tcp", 5e8], "b:1": ["tcp", 4e8], "c:1": ["", 0.0]}


def test_joining_into_nothing_keeps_everything():
    assert aggregate(empty(), filled().data) == filled().data


def test_a_gauge_alone_is_worth_telling():
    recorder = Stats()
    assert is_empty(recorder.data)
    recorder.set_gauge(stats.LEASES_HELD, 0)
    assert not recorder.is_empty()


def test_observations_are_bounded(monkeypatch):
    monkeypatch.setattr(stats, "MAX_OBSERVATIONS", 3)
    recorder = Stats()
    for _ in range(10):
        recorder.observe(stats.QUEUE_SECONDS, 1.0)
    assert len(recorder.data["seconds"]["queue_seconds"]) == 3
    joined = aggregate(recorder.data, {"seconds": {"queue_seconds": [1.0] * 10}})
    assert len(joined["seconds"]["queue_seconds"]) == 3


def test_the_log_line_has_counts_and_quantiles():
    recorder = Stats()
    for number in range(1, 101):
        recorder.observe(stats.NOTICED_SECONDS, number / 1000)
    recorder.fail("a", 2)
    recorder.fail("b")
    line = reduce(recorder.data)
    assert line["until noticed p50 ms"] == pytest.approx(51)
    assert line["until noticed p90 ms"] == pytest.approx(91)
    assert line["load failures"] == 3
    assert reduce(empty())["loads"] == 0
    assert "load failures" in repr(recorder)


def test_a_load_is_measured_and_foreseen_in_the_same_form():
    recorder = Stats()
    assert recorder.is_empty()
    recorder.loads([(1000, 3, 1000, 4, 0.001, 0.002), (0, 0, 500, 2, 0.003, 0.004)])
    assert not recorder.is_empty()
    recorder.loads([(999, 4, 1000, 4, 0.005, 0.006)])
    assert recorder.data["counts"] == {
        "read_bytes": 1999,
        "read_descriptors": 7,
        "predicted_bytes": 2500,
        "predicted_descriptors": 10,
    }
    assert recorder.data["seconds"] == {
        "load_bytes": [1000, 0, 999],
        "load_descriptors": [3, 0, 4],
        "predicted_load_bytes": [1000, 500, 1000],
        "predicted_load_descriptors": [4, 2, 4],
        "post_seconds": [0.001, 0.003, 0.005],
        "until_noticed_seconds": [0.002, 0.004, 0.006],
    }
    shape = {metric.name: (metric.kind, metric.buckets, metric.label) for metric in METRICS}
    for what in ("bytes", "descriptors"):
        assert shape[f"hybridpd_load_{what}"] == shape[f"hybridpd_predicted_load_{what}"]


def test_loads_are_counted_beyond_the_observations_that_are_kept(monkeypatch):
    monkeypatch.setattr(stats, "MAX_OBSERVATIONS", 3)
    recorder = Stats()
    for _ in range(10):
        recorder.loads([(1000, 3, 1000, 3, 0.001, 0.002)])
    assert recorder.data["counts"]["read_bytes"] == 10_000
    assert {len(kept) for kept in recorder.data["seconds"].values()} == {3}


def test_unknown_names_are_refused():
    recorder = Stats()
    with pytest.raises(KeyError, match="lodas"):
        recorder.count("lodas")
    with pytest.raises(KeyError):
        recorder.observe("loads", 1.0)
    with pytest.raises(KeyError):
        recorder.set_gauge("loads", 1)


def test_every_value_reaches_exactly_one_metric():
    data = empty()
    expected = set()
    for metric in METRICS:
        if metric.key == stats.LINKS:
            data[metric.key] = {"a": ["tcp", 1.0]}
            expected.add((metric.name, ("a", "tcp")))
        elif metric.label:
            data[metric.key] = {"a": 1}
            expected.add((metric.name, ("a",)))
        elif metric.kind == "histogram":
            data["seconds"][metric.key] = [1.0]
            expected.add((metric.name, ()))
        else:
            data["counts" if metric.kind == "counter" else "gauges"][metric.key] = 1
            expected.add((metric.name, ()))
    shown = [(sample.metric.name, sample.labels) for sample in samples(data)]
    assert sorted(shown) == sorted(expected)
    assert set(data["counts"]) == set(stats.COUNTS)
    assert set(data["seconds"]) == set(stats.OBSERVED)
    assert set(data["gauges"]) == set(stats.GAUGES)
    assert list(samples(empty())) == []


def test_metric_names_are_a_contract():
    shown = {
        metric.name + ("_total" if metric.kind == "counter" else ""): metric.label
        for metric in METRICS
    }
    assert shown == {
        "hybridpd_read_bytes_total": "",
        "hybridpd_predicted_bytes_total": "",
        "hybridpd_read_descriptors_total": "",
        "hybridpd_predicted_descriptors_total": "",
        "hybridpd_load_bytes": "",
        "hybridpd_load_descriptors": "",
        "hybridpd_predicted_load_bytes": "",
        "hybridpd_predicted_load_descriptors": "",
        "hybridpd_mispredicted_loads_total": "",
        "hybridpd_loads_total": "",
        "hybridpd_load_failures_total": "reason",
        "hybridpd_recomputed_requests_total": "",
        "hybridpd_leases_expired_total": "",
        "hybridpd_leases_released_total": "",
        "hybridpd_leases_held": "",
        "hybridpd_blocks_held": "",
        "hybridpd_peers": "state",
        "hybridpd_link_bytes_per_second": "peer,path",
        "hybridpd_side_channel_refused_total": "reason",
        "hybridpd_checksums_total": "result",
        "hybridpd_post_seconds": "",
        "hybridpd_until_noticed_seconds": "",
        "hybridpd_queue_seconds": "",
    }
    assert all(metric.documentation.endswith(".") for metric in METRICS)
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_refused_connections_are_counted_by_reason_and_added():
    recorder = Stats()
    recorder.refuse("wrong_key", 2)
    recorder.refuse("wrong_key")
    recorder.refuse("garbage")
    joined = aggregate(recorder.take(), {"refused": {"wrong_key": 4}})
    shown = {sample.labels: sample.value for sample in samples(joined)}
    assert shown == {("wrong_key",): 7, ("garbage",): 1}
    assert recorder.is_empty()
