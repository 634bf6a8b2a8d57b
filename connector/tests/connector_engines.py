"""Engines in one process: both halves, every rank, the in-memory agent, and a small stand-in for
vLLM's scheduler that keeps its rules (and trips over the same things as it does).

Rules kept: a result may only name a request that is known; ranks are joined as vLLM's aggregator
does; a failed load acts only on a request that waits for it; blocks of an ended request are kept
until the result that names it; metadata is shown to a rank twice in a step.
"""

import ctypes
import dataclasses
import itertools
import time
from collections import Counter

import numpy as np
from connector_summer import SlowSummer
from geometry_reference import RankMemory

from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.consumer import Timeouts
from hybridpd_connector.failure_reasons import split
from hybridpd_connector.handshake import Hello, Responder, decode_question
from hybridpd_connector.link_probe import Scratch
from hybridpd_connector.metadata import GroupFacts, RequestFacts
from hybridpd_connector.named_peers import parse_names
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.scheduler_side import SchedulerHalf
from hybridpd_connector.side_channel import SideChannelError
from hybridpd_connector.worker_side import RankCache, RankSettings, WorkerHalf
from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    ModelFacts,
    RequestBlocks,
    StateFacts,
    layout_of,
)

NEVER = 3600.0
LEASE_SECONDS = 30
STEPS = 4000

HYBRID = ModelFacts(
    "tiny",
    attention_layers=(2, 5),
    state_layers=(0, 1, 4, 6, 7),
    attention=AttentionFacts(query_heads=4, kv_heads=2, head_dim=4, v_head_dim=4),
    state=StateFacts("mamba2", inner=32, heads=8, head_dim=4, state_size=4, groups=2),
)
ONE_GROUP = dataclasses.replace(
    HYBRID,
    attention=AttentionFacts(query_heads=4, kv_heads=1, head_dim=4, v_head_dim=4),
    state=StateFacts("mamba2", inner=32, heads=8, head_dim=4, state_size=4, groups=1),
)
DENSE = ModelFacts(
    "dense",
    attention_layers=(0, 1, 2),
    state_layers=(),
    attention=AttentionFacts(query_heads=4, kv_heads=2, head_dim=4, v_head_dim=4),
    state=None,
)


def host_scratch(size=1 << 16):
    buffer = (ctypes.c_uint8 * size)()
    return Scratch(MemoryRegion(ctypes.addressof(buffer), size), buffer)


class World:
    """One network, one clock, the addresses of all side channels."""

    def __init__(self):
        self.network = FakeNetwork()
        self.now = 1000.0
        self.tick = 0.0
        self.responders = {}
        self.asked = []
        self.engines = []

    def clock(self):
        """``tick`` above 0: time passes with every look at the clock."""
        self.now += self.tick
        return self.now

    def ask(self, host, port, question, timeout_seconds):
        self.asked.append(decode_question(question)[0])
        responder = self.responders.get((host, port))
        if responder is None:
            raise SideChannelError("side channel", "an answer", "connection refused")
        return responder.answer(question)

    def hang_up(self):
        """Every answer is there at once: nothing to end."""

    def engine(self, name, role, **settings):
        engine = Engine(self, name, role, **settings)
        self.engines.append(engine)
        return engine

    def close(self):
        for engine in self.engines:
            engine.close()

    def until(self, condition, *engines):
        """Step ``engines`` (all by default) until ``condition()``; handshakes run on threads."""
        for _ in range(STEPS):
            for engine in engines or self.engines:
                engine.step()
            if condition():
                return
            time.sleep(0.0005)
        raise AssertionError(f"not reached in {STEPS} steps")


class Pool:
    """vLLM's pool of blocks as far as the connector uses it: blocks that nobody counts are free."""

    def __init__(self, blocks):
        self.blocks = range(blocks)
        self.free = list(range(1, blocks))
        self.references = Counter()

    def take(self):
        block = self.free.pop()
        assert not self.references[block], "a block that somebody holds was free"
        self.references[block] = 1
        return block

    def touch(self, blocks):
        assert all(self.references[block] for block in blocks), "nobody has it"
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0, "given back twice"
            if not self.references[block]:
                self.free.append(block)


@dataclasses.dataclass
class Request:
    """A request as the stand-in scheduler sees it."""

    facts: RequestFacts
    status: str = "waiting"
    blocks: tuple = ()
    computed: int = 0
    answer: dict | None = None
    recomputed: bool = False


class Engine:
    """One engine with all its ranks."""

    def __init__(
        self,
        world,
        name,
        role,
        model=HYBRID,
        tp_size=1,
        blocks=24,
        policy="fail",
        port=None,
        lease_seconds=LEASE_SECONDS,
        links=None,
        step_wait_seconds=0.0,
        checksum_every=0,
        checksum_required=False,
        meets=(),
        **engine_facts,
    ):
        """``links``: settings of the link probe, which is left out without them. ``meets``: names
        of prefill engines that are met before a request names them."""
        self.world, self.name, self.policy = world, name, policy
        self.step_wait_seconds, self.checksum_required = step_wait_seconds, checksum_required
        self.meets = parse_names(meets)
        facts = EngineFacts(tp_size, packing=engine_facts.pop("packing", "token"), **engine_facts)
        self.layout = layout_of(model, facts, "model", vllm_version="0.32.0")
        groups = [GroupFacts(kind, self.layout.block_tokens) for kind in self.layout.group_kinds]
        port = port or 5600 + len(world.engines)
        self.identity = Identity(
            name, "10.0.0.1", port, tp_size, role, lease_seconds, checksum_every
        )
        self.half = SchedulerHalf(self.identity, groups)
        self.memories, self.ranks, self.summers, self.links = [], [], [], links
        for rank in range(tp_size):
            self._add_rank(rank, role, blocks, lease_seconds)
        self._publish(role, port)
        self.pool = Pool(blocks)
        self.half.decode.held.bind(self.pool)
        self.requests = {}
        self.counts = {"sent": Counter(), "received": Counter()}
        self.reasons = {}
        self.failures = []

    @property
    def free(self):
        return self.pool.free

    def _add_rank(self, rank, role, blocks, lease_seconds):
        memory = RankMemory(self.layout, rank, blocks, 0, interleaved=False)
        memory.base = memory.bytes.ctypes.data
        memory.placement = dataclasses.replace(
            memory.placement,
            region_bases=tuple(memory.base + base for base in memory.placement.region_bases),
        )
        self.memories.append(memory)
        region = MemoryRegion(memory.base, len(memory.bytes))
        scratch = None if self.links is None or role == "producer" else host_scratch()
        summer = SlowSummer(memory)
        self.summers.append(summer)
        cache = RankCache(
            self.layout, memory.placement, (region,), self._zeroer(memory), scratch, summer
        )
        settings = RankSettings(
            self.name, role, lease_seconds, NEVER, NEVER, Timeouts(handshake=20.0, read=60.0),
            step_wait_seconds=self.step_wait_seconds,
            checksum_every=self.identity.checksum_every, checksum_required=self.checksum_required,
            prefill_peers=self.meets,
            **(self.links or {}),
        )  # fmt: skip
        agent = FakeAgent(f"{self.name}/{rank}", self.world.network)
        half = WorkerHalf(cache, agent, self.world, settings, clock=self.world.clock)
        self.ranks.append(half)

    @staticmethod
    def _zeroer(memory):
        def zero(tails):
            for address, length in itertools.chain.from_iterable(tail.ranges() for tail in tails):
                memory.bytes[memory.span(address, length)] = 0

        return zero

    def _publish(self, role, port):
        responder = Responder(self.name)
        responder.publish(
            Hello(
                engine_id=self.name,
                connector_version="0.1.0",
                vllm_version="0.32.0",
                role=role,
                tp_size=len(self.ranks),
                lease_seconds=self.identity.lease_seconds,
                layout=self.layout.to_dict(),
                ranks=tuple(rank.hello() for rank in self.ranks),
            )
        )
        self.world.responders["10.0.0.1", port] = responder

    def close(self):
        for rank in self.ranks:
            rank.close()

    def add(self, request_id, token_ids, params, **more):
        """A request arrives. P computes one token less of a prefill."""
        facts = RequestFacts(request_id, len(token_ids), tuple(token_ids), params, **more)
        request = self.requests[request_id] = Request(facts)
        if self.half.on_new_request(facts):
            request.facts = facts._replace(
                prompt_tokens=len(token_ids) - 1, token_ids=tuple(token_ids[:-1])
            )
        return request

    def allocate(self, tokens):
        """Distinct blocks for every group, as vLLM would hand out for ``tokens`` tokens."""
        groups = []
        for kind in self.layout.group_kinds:
            count = -(-tokens // self.layout.block_tokens) if kind == "attention" else 1
            groups.append([self.pool.take() for _ in range(count)])
        return tuple(groups)

    def schedule(self, request_id, computed=0):
        """One pass of the scheduler over a waiting request. ``computed``: local prefix tokens."""
        request = self.requests[request_id]
        external = self.half.external_tokens(request_id, computed)
        assert self.half.external_tokens(request_id, computed) == external, "has a side effect"
        request.blocks = self.allocate(request.facts.prompt_tokens)
        request.computed = computed + external
        self.half.on_allocated(request_id, request.blocks, external)
        request.status = "loading" if external else "running"

    def prefill(self, request_id, made):
        """Compute a whole prompt here and end the request; returns the answer's params."""
        request = self.requests[request_id]
        self.schedule(request_id)
        request.computed = request.facts.prompt_tokens
        self.fill(request, made)
        self.end(request_id, completed=True)
        return request.answer

    def fill(self, request, made):
        for memory in self.memories:
            memory.write_request(made, RequestBlocks(request.blocks))

    def end(self, request_id, completed=False):
        """The request is over; its blocks are kept when somebody still needs them."""
        request = self.requests[request_id]
        loading = request.status == "loading"
        request.status = "finished"
        keep, request.answer = self.half.on_finished(
            request_id, request.computed if completed else None, request.blocks
        )
        if not keep and not loading:
            self.release(request_id)

    def release(self, request_id):
        self.give_back(self.requests.pop(request_id))

    def give_back(self, request):
        self.pool.free_blocks(block for group in request.blocks for block in group)

    def step(self):
        """One engine step on all ranks, and the scheduler's reaction to what they report."""
        orders = self.half.build_orders()
        sent, received, late, said, landed = set(), set(), set(), {}, Counter()
        for rank in self.ranks:
            rank.absorb(orders)
            rank.renew()
            rank.absorb(orders)
            rank.start_loads()
            results, reasons = rank.poll()
            assert results.failed <= results.received
            said = {**reasons, **said}
            reads = rank.take_late()
            late |= reads.late
            landed.update(reads.landed)
            sent |= self._join("sent", results.sent)
            received |= self._join("received", results.received)
            self.failures.extend(results.failed)
        self.reasons = {**{name: split(text)[0] for name, text in said.items()}, **self.reasons}
        failed = set(self.failures) & received
        self.failures = [item for item in self.failures if item not in failed]
        self.late = late, landed
        self._react(sent, received, failed, said)

    def _join(self, kind, request_ids):
        whole = set()
        for request_id in request_ids:
            self.counts[kind][request_id] += 1
            if self.counts[kind][request_id] == len(self.ranks):
                del self.counts[kind][request_id]
                whole.add(request_id)
        return whole

    def _react(self, sent, received, failed, said):
        for request_id in failed:
            request = self.requests[request_id]
            if request.status == "loading":
                if self.policy == "fail":
                    self.end(request_id)
                else:
                    request.recomputed = True
        self.half.on_late(*self.late)
        self.half.on_results(sent, received, failed, said)
        for request_id in received:
            request = self.requests[request_id]
            if request.status == "finished":
                self.release(request_id)
                continue
            assert request.status == "loading"
            if request.recomputed:
                self.give_back(request)
                self.schedule(request_id)
                assert request.computed == 0
            request.status = "running"
        for request_id in sent:
            assert self.requests[request_id].status == "finished"
            self.release(request_id)

    def pages_equal(self, request_id, made, tokens):
        """Do all ranks hold what a single engine would hold after ``tokens`` tokens?"""
        request = self.requests[request_id]
        pages = -(-tokens // self.layout.block_tokens)
        for memory in self.memories:
            for layer in self.layout.layers:
                ids = request.blocks[layer.group]
                for index, block in enumerate(ids[:pages] if layer.kind == "attention" else ids):
                    expected = memory.expected_page(made, layer, index)
                    at = memory.page_at(layer, block)
                    if not np.array_equal(memory.bytes[at : at + len(expected)], expected):
                        return False
        return True


TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What every router sends to P."""
