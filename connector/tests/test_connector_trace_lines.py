"""What a traced connector writes, around one that does nothing: the lines that
`benchmarks/gpu/handover_stages.py` reads."""

import enum
from types import SimpleNamespace

import pytest

from hybridpd_testkit.decode_steps import Step, seen_in
from hybridpd_testkit.trace_lines import read_lines
from hybridpd_testkit.tracing import MARK_VARIABLE, TRACE_VARIABLE, Traced

MARK = "stage-"
REQUEST, OTHER = "cmpl-stage-a-0x-0", "cmpl-warm-1x-0"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Connector:
    """The calls that are noted, as vLLM makes them."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.metadata = None

    def has_connector_metadata(self):
        return self.metadata is not None

    def _get_connector_metadata(self):
        return self.metadata

    def on_new_request(self, request):
        pass

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return SimpleNamespace(loads=[])

    def update_connector_output(self, connector_output):
        pass

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def handle_preemptions(self, kv_connector_metadata):
        pass

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def get_transfer_results(self, finished_req_ids):
        return SimpleNamespace(finished_recving={REQUEST} if self.metadata else set())

    def get_kv_connector_stats(self):
        return None

    def build_connector_worker_meta(self):
        return None


class Noted(Traced, Connector):
    def traced_loads(self, metadata):
        return metadata.loads


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(MARK_VARIABLE, MARK)

    def build(role, kv_role="kv_consumer"):
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=kv_role))
        return Noted(config, role, None)

    return build


def lines_of(folder):
    return [line for _, lines in read_lines(folder) for line in lines]


def schedule(connector, **tokens):
    names = {REQUEST if name == "ours" else OTHER: count for name, count in tokens.items()}
    connector.build_connector_meta(
        SimpleNamespace(num_scheduled_tokens=names, total_num_scheduled_tokens=sum(names.values()))
    )


def test_a_schedulers_side_of_a_hand_over(make, tmp_path):
    connector = make(Role.SCHEDULER)
    request = SimpleNamespace(request_id=REQUEST, kv_transfer_params={"a": 1})
    connector.on_new_request(request)
    connector.update_state_after_alloc(request, None, 0)
    connector.update_state_after_alloc(request, None, 99)
    schedule(connector)
    connector.update_connector_output(SimpleNamespace(finished_recving={REQUEST}))
    schedule(connector, ours=1)
    schedule(connector, ours=1)
    connector.request_finished_all_groups(request, ())
    schedule(connector, other=1)
    events = [line[0] for line in lines_of(tmp_path)]
    assert events == [
        "arrived", "taken", "scheduled", "step", "reported", "first step", "step", "step",
    ]  # fmt: skip
    (steps,) = seen_in(lines_of(tmp_path), [(0.0, 1e12)]).steps
    assert [step[1:6] for step in steps] == [(0, 0, 1, 1, 0), (1, 1, 0, 0, 0), (1, 1, 0, 0, 1)]
    assert all(isinstance(step, Step) and step.own >= 0 for step in steps)


def test_a_workers_side_of_a_hand_over(make, tmp_path):
    connector = make(Role.WORKER)

    def step(loads, finished=()):
        connector.metadata = SimpleNamespace(loads=loads)
        connector.handle_preemptions(connector.metadata)
        connector.start_load_kv(None)
        connector.get_transfer_results(set(finished))
        connector.get_kv_connector_stats()
        connector.build_connector_worker_meta()
        connector.metadata = None

    connector.start_load_kv(None)  # a trial step has no metadata
    step([OTHER])
    step([REQUEST, OTHER])
    step([])
    step([], finished=[REQUEST])
    noted = [(line[0], line[2]) for line in lines_of(tmp_path) if line[0] == "calls"]
    assert noted == [("calls", 1), ("calls", 0)]
    (begun,) = [line[2] for line in lines_of(tmp_path) if line[0] == "post begun"]
    (posted,) = [line[2] for line in lines_of(tmp_path) if line[0] == "posted"]
    assert begun <= posted


def test_a_prefill_engine_notes_its_answers_only(make, tmp_path):
    connector = make(Role.SCHEDULER, "kv_producer")
    request = SimpleNamespace(request_id=REQUEST, kv_transfer_params={"a": 1})
    connector.on_new_request(request)
    schedule(connector, ours=50)
    connector.request_finished_all_groups(request, ())
    assert lines_of(tmp_path) == []
