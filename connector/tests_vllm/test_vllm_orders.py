"""A step's orders on their way to the ranks, as vLLM sends them. Without an engine."""

import copy
import pickle

import pytest

from hybridpd_connector.metadata import NO_ORDERS, Load, Pin, StepOrders

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, on import


def test_vllm_orders_of_a_step_without_any_are_sent_by_name():
    from hybridpd_connector.connector import NOTHING

    sent = pickle.dumps({"kv_connector_metadata": NOTHING, "more": NOTHING})
    arrived = pickle.loads(sent)
    assert arrived["kv_connector_metadata"] is arrived["more"] is NOTHING
    assert copy.deepcopy(NOTHING) is NOTHING
    assert len(sent) < 130
    assert NOTHING.orders is NO_ORDERS


@pytest.mark.parametrize(
    "orders",
    [
        NO_ORDERS,
        StepOrders(3, pins=(Pin("p", 7), Pin("q", 8, 20, ((1,), (2, 3))))),
        StepOrders(4, aborts=("a",), loads=(Load("d", ((1,), (2, 3)), 32, "other_prompt"),)),
    ],
    ids=["none", "pins", "loads"],
)
def test_vllm_orders_arrive_as_they_were(orders):
    from hybridpd_connector.connector import ConnectorMetadata

    arrived = pickle.loads(pickle.dumps(ConnectorMetadata(orders))).orders
    assert arrived == orders
    assert type(arrived) is StepOrders
    assert [type(load) for load in arrived.loads] == [Load] * len(orders.loads)
