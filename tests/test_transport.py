"""The links: what is sent arrives to the bit and in order; strangers, liars and oversized messages are refused by name."""

from __future__ import annotations

import contextlib
import pickle
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.network import Path as Road
from atoll.errors import ClusterError, ProgramError, WorkerLostError, WorkplaceError
from atoll.runtime.keys import Bundle, make_run_keys, read_bundle
from atoll.runtime.transport import rpc
from atoll.runtime.transport.frames import DTYPES, RefusedError, decode_header, frames_of, header_of, messages_in
from atoll.runtime.transport.local import LocalHub
from atoll.runtime.transport.native import Native
from atoll.runtime.transport.router import Router
from atoll.runtime.transport.shaped import Buckets, Shaped
from atoll.runtime.transport.wire import Wire
from atoll.runtime.world import Channel, Stop, StoppedError

torch.set_num_threads(1)

pytestmark = pytest.mark.wire
SECOND = 10**9
LIMIT = 64 << 20
LIMITS = {"max_message_bytes": LIMIT, "keepalive_ns": 5 * SECOND, "connect_ns": 10 * SECOND}


def together(actions: Sequence[Callable[[], object]]) -> None:
    """Run all at once, each on a thread; raise the first error."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a channel hangs"
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    paths = make_run_keys(tmp_path_factory.mktemp("keys"), ["a", "b", "c"], head="a", head_address="localhost:1")
    return {name: read_bundle(path) for name, path in paths.items()}


def wires(bundles: dict[str, Bundle], names: Sequence[str] = ("a", "b"), hidden: Sequence[str] = (),
          **limits: int) -> dict[str, Wire]:
    """Connected wires of workers that are named like their machines; ``hidden`` ones cannot be dialled."""
    machines = {name: name for name in names}
    made = {name: Wire(name, bundles[name], machines, Stop(), bind=None if name in hidden else "127.0.0.1:0",
                       **(LIMITS | limits)) for name in names}
    addresses = {name: None if name in hidden else f"127.0.0.1:{wire.port}" for name, wire in made.items()}
    others = {name: [other for other in names if other != name] for name in names}
    together([lambda name=name: made[name].connect(addresses, sends_to=others[name], receives_from=others[name])
              for name in names])
    return made


def natives(names: Sequence[str] = ("a", "b"), direct: bool = False) -> dict[str, Native]:
    made = {name: Native(name, names, {each: each for each in names}, Stop(), device=torch.device("cpu"),
                         max_message_bytes=LIMIT, connect_ns=10 * SECOND, direct=direct) for name in names}
    port = made[names[0]].open_store()
    together([lambda name=name: made[name].connect(f"127.0.0.1:{port}") for name in names])
    return made


def shaped(bundles: dict[str, Bundle], folder: Path) -> dict[str, Channel]:
    road = Road(segments=("road",), latency_ns=1_000_000, message_ns=0)
    buckets = Buckets(folder / "links.bin", {"road": SECOND})
    return {name: Shaped(wire, name, buckets, lambda source, target: road, Stop()) for name, wire in wires(bundles).items()}


@pytest.fixture(params=["wire", "native", "direct", "shaped"])
def pair(request: pytest.FixtureRequest, bundles: dict[str, Bundle], tmp_path: Path) -> Iterator[dict[str, Channel]]:
    made: dict[str, Channel] = (dict(wires(bundles)) if request.param == "wire" else
                                shaped(bundles, tmp_path) if request.param == "shaped" else
                                dict(natives(direct=request.param == "direct")))
    yield made
    together([channel.close for channel in made.values()])


def samples() -> list[torch.Tensor]:
    """Every dtype that travels, with empty, scalar, non-contiguous and larger-than-a-frame tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for dtype in DTYPES.values():
        value = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3), generator=generator)
        tensors += [value.to(dtype), value.to(dtype).t(), value[0, 0].to(dtype), value[:0].to(dtype)]
    tensors += [torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.bfloat16),
                torch.randn(700_001, generator=generator, dtype=torch.float64), torch.nn.Parameter(torch.randn(4))]
    return tensors


def same_bits(found: torch.Tensor, sent: torch.Tensor) -> bool:
    raw = (found.reshape(-1).view(torch.uint8), sent.detach().contiguous().reshape(-1).view(torch.uint8))
    return found.dtype == sent.dtype and found.shape == sent.shape and torch.equal(*raw)


def test_all_dtypes_and_shapes_arrive_to_the_bit(pair: dict[str, Channel]) -> None:
    sent = samples()
    for source, target in (("a", "b"), ("b", "a")):
        together([lambda s=source, t=target: pair[s].send(t, "many", sent)])
        found = pair[target].receive(source, "many")
        assert len(found) == len(sent)
        assert all(same_bits(*both) for both in zip(found, sent, strict=True))


def test_send_returns_the_payload_bytes_and_order_is_kept(pair: dict[str, Channel]) -> None:
    sizes = [0, 1, 3_000_000, 7, 1_048_577, 2]

    def send() -> None:
        for number, size in enumerate(sizes):
            assert pair["a"].send("b", f"m{number}", [torch.full((size,), number, dtype=torch.uint8)]) == size

    def receive() -> None:
        for number, size in enumerate(sizes):
            [found] = pair["b"].receive("a", f"m{number}")
            assert torch.equal(found, torch.full((size,), number, dtype=torch.uint8))

    together([send, receive])


def test_memory_that_is_used_again_holds_nothing_that_is_still_under_way() -> None:
    """More messages than may be under way, of growing and shrinking size, far ahead of their receiver."""
    made = natives(direct=True)
    sizes = [1 + (number * 7919) % 60_000 for number in range(120)]
    assert made["a"].prompt("b", 20)

    def send() -> None:
        for number, size in enumerate(sizes):
            value = torch.full((size,), number, dtype=torch.int32)
            made["a"].send("b", f"m{number}", [value])
            value.fill_(-1)  # a send that has returned has taken what it was given

    def receive() -> None:
        time.sleep(0.2)
        for number, size in enumerate(sizes):
            [found] = made["b"].receive("a", f"m{number}")
            assert torch.equal(found, torch.full((size,), number, dtype=torch.int32))

    together([send, receive])
    assert len(made["a"]._flights["b"]) <= made["a"]._most_flights["b"] + 1
    together([channel.close for channel in made.values()])


def test_an_unexpected_label_is_an_error_that_names_both(pair: dict[str, Channel]) -> None:
    pair["a"].send("b", "activation.0.1.2", [torch.zeros(1)])
    with pytest.raises(ProgramError, match=r"machine b expected delta from machine a and got (release )?activation"):
        pair["b"].receive("a", "delta")


def test_a_stopped_receiver_returns(bundles: dict[str, Bundle]) -> None:
    for made in (wires(bundles), natives(), natives(direct=True)):
        stop = made["b"]._stop
        threading.Timer(0.1, lambda stop=stop: stop.set("told to")).start()
        with pytest.raises(StoppedError, match="told to"):
            made["b"].receive("a", "never")
        made["b"].close()
        made["a"]._stop.set("told to")
        made["a"].close()


# -- who may speak -----------------------------------------------------------------------------------------------------


def test_keys_are_private_and_the_authority_is_not_written(tmp_path: Path) -> None:
    paths = make_run_keys(tmp_path / "keys", ["reef-1", "lagoon_2"], head="reef-1", head_address="10.0.0.1:7700")
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"reef-1.pem", "lagoon_2.pem"}
    for machine, path in paths.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        bundle = read_bundle(path)
        assert (bundle.machine, bundle.head, bundle.head_address) == (machine, "reef-1", "10.0.0.1:7700")
        assert path.read_text().count("PRIVATE KEY") == 2  # one block: its own key, not the authority's
    assert read_bundle(paths["reef-1"]).key != read_bundle(paths["lagoon_2"]).key


def test_a_bundle_that_is_missing_open_or_broken_is_refused(tmp_path: Path) -> None:
    path = make_run_keys(tmp_path, ["a"])["a"]
    with pytest.raises(WorkplaceError, match="cannot be read"):
        read_bundle(tmp_path / "nowhere.pem")
    path.chmod(0o644)
    with pytest.raises(WorkplaceError, match=r"read by others.*chmod 600"):
        read_bundle(path)
    path.chmod(0o600)
    path.write_text(path.read_text().replace("CERTIFICATE", "CERT"))
    with pytest.raises(WorkplaceError, match="not a key bundle"):
        read_bundle(path)
    with pytest.raises(ClusterError, match="rename it"):
        make_run_keys(tmp_path, ["two words"])


def test_keys_of_another_run_are_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    stranger = read_bundle(make_run_keys(tmp_path, ["a"])["a"])
    machines = {"a": "a", "b": "b"}
    listening = Wire("b", bundles["b"], machines, Stop(), bind="127.0.0.1:0", **LIMITS)
    dialling = Wire("a", stranger, machines, Stop(), bind="127.0.0.1:0", **(LIMITS | {"connect_ns": SECOND // 2}))
    with pytest.raises(WorkerLostError, match=r"machine a cannot reach machine b.*not with this run's keys"):
        dialling.connect({"a": None, "b": f"127.0.0.1:{listening.port}"}, sends_to=["b"], receives_from=[])
    dialling.close()
    listening.close()


def call(bundle: Bundle, port: int, claimed: str, frames: Sequence[bytes]) -> grpc.Call:
    """Push raw frames to worker b as whoever; returns the ended call."""
    channel = rpc.dial(bundle, f"127.0.0.1:{port}", "b", max_message_bytes=8 << 20, keepalive_ns=SECOND)
    found = channel.stream_unary("/atoll.wire/push").future(iter(frames), metadata=tuple(rpc.metadata(claimed)))
    with contextlib.suppress(grpc.RpcError):
        found.result(timeout=10)
    return found


@pytest.mark.parametrize(("holder", "claimed", "sentence"), [
    ("c", "a", "a caller says it is worker 'a' of machine a, but its keys were made for machine c"),
    ("a", "z", "a caller on machine a says it is worker 'z'"),
])
def test_a_caller_that_is_not_who_it_says_is_refused(bundles: dict[str, Bundle], holder: str, claimed: str,
                                                     sentence: str) -> None:
    wire = Wire("b", bundles["b"], {"a": "a", "b": "b"}, Stop(), bind="127.0.0.1:0", **LIMITS)
    ended = call(bundles[holder], wire.port, claimed, [])
    assert ended.code() is grpc.StatusCode.PERMISSION_DENIED
    assert sentence in ended.details()
    wire.close()


def test_a_second_stream_under_one_name_is_refused(bundles: dict[str, Bundle]) -> None:
    made = wires(bundles)
    ended = call(bundles["a"], made["b"].port, "a", [])
    assert ended.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "two workers claim one name" in ended.details()
    together([wire.close for wire in made.values()])


# -- what may be said --------------------------------------------------------------------------------------------------


def test_an_oversized_message_is_refused_and_both_are_named(bundles: dict[str, Bundle]) -> None:
    made = wires(bundles, max_message_bytes=1000)
    made["a"].send("b", "small", [torch.zeros(1000, dtype=torch.uint8)])
    assert made["b"].receive("a", "small")[0].numel() == 1000
    sentence = "machine b refused a message of machine a: large: the message has 1001 bytes, allowed: 1000"
    with pytest.raises(WorkerLostError, match=sentence):
        for _ in range(100):
            made["a"].send("b", "large", [torch.zeros(13, 77, dtype=torch.uint8)])
            time.sleep(0.01)
    with pytest.raises(WorkerLostError, match=sentence):
        made["b"].receive("a", "large")
    together([wire.close for wire in made.values()])


def framed(header: bytes, payload: bytes = b"") -> bytes:
    return len(header).to_bytes(4, "little") + header + payload


@pytest.mark.parametrize("frames", [
    [b""], [b"\xff\xff\xff\xff"], [framed(b"")], [framed(pickle.dumps({"label": "x"}))], [framed(b'{"label":"x"}')],
    [framed(b'["x",0,[["object",[1]]]]')], [framed(b'["x",0,[["int64",[-1]]]]')], [framed(b'["x",0,[["uint8",[9]]]]', b"123")],
    [framed(b'["x",0,[["uint8",[2]]]]', b"123")], [framed(b'["x",5,[]]')], [framed(b'["x",0,[["uint8",[0,99999999999]]]]')],
    [framed(b'["x",0,[],7]')],
])
def test_malformed_messages_are_refused(bundles: dict[str, Bundle], frames: list[bytes]) -> None:
    wire = Wire("b", bundles["b"], {"a": "a", "b": "b"}, Stop(), bind="127.0.0.1:0", **LIMITS)
    ended = call(bundles["a"], wire.port, "a", frames)
    assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "machine b refused a message of machine a" in ended.details()
    with pytest.raises(WorkerLostError, match="refused"):
        wire.receive("a", "x")
    wire.close()


@given(st.lists(st.binary(max_size=80), max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_bytes_of_a_peer_do_more_than_be_refused(frames: list[bytes]) -> None:
    try:
        for message in messages_in(frames, 10_000):
            assert message.header.payload_bytes <= 10_000
    except RefusedError:
        pass


@given(st.text(max_size=40), st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4)),
                                     max_size=5))
@settings(max_examples=100, deadline=None)
def test_frames_give_back_what_went_in(label: str, specs: list[tuple[str, list[int]]]) -> None:
    tensors = [torch.ones(shape).to(DTYPES[dtype]) for dtype, shape in specs]
    header = header_of(label, 0, tensors)
    [message] = messages_in(frames_of(header, tensors), 1 << 20)
    assert message.header == header
    assert all(same_bits(*both) for both in zip(message.tensors, tensors, strict=True))


def test_too_many_tensors_and_unknown_dtypes_are_refused_before_sending() -> None:
    with pytest.raises(RefusedError, match="cannot be sent"):
        header_of("x", 0, [torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(RefusedError, match="1025 tensors"):
        decode_header(b'["x",0,[' + b",".join([b'["bool",[]]'] * 1025) + b"]]", 1 << 20)


# -- coming and going --------------------------------------------------------------------------------------------------


def test_a_worker_that_nobody_can_dial_dials_for_both_directions(bundles: dict[str, Bundle]) -> None:
    made = wires(bundles, ("a", "b", "c"), hidden=("c",))
    for source in made:
        for target in made:
            if source != target:
                made[source].send(target, "x", [torch.tensor(7)])
                assert made[target].receive(source, "x")[0].item() == 7
    together([wire.close for wire in made.values()])


def test_what_was_sent_before_an_orderly_end_still_arrives(bundles: dict[str, Bundle]) -> None:
    for made in (wires(bundles), natives(), natives(direct=True)):
        for number in range(20):
            made["a"].send("b", f"m{number}", [torch.tensor(number)])
        together([channel.close for channel in made.values()])
        assert [made["b"].receive("a", f"m{number}")[0].item() for number in range(20)] == list(range(20))
        with pytest.raises(WorkerLostError, match="machine a is gone: it finished and sends no more, while machine b waited "
                                                  "for more"):
            made["b"].receive("a", "more")


def test_a_broken_stream_names_the_machine_and_what_was_awaited(bundles: dict[str, Bundle]) -> None:
    made = wires(bundles)
    made["a"]._stop.set("it dies")
    made["a"].close()
    with pytest.raises(WorkerLostError, match="machine a is gone: its connection broke, while machine b waited for delta"):
        made["b"].receive("a", "delta")
    with pytest.raises(WorkerLostError, match="machine a is gone"):
        for _ in range(100):
            made["b"].send("a", "activation", [torch.zeros(4)])
            time.sleep(0.01)
    made["b"].close()


def test_a_taken_port_is_said_in_one_sentence(bundles: dict[str, Bundle]) -> None:
    first = Wire("b", bundles["b"], {"a": "a", "b": "b"}, Stop(), bind="127.0.0.1:0", **LIMITS)
    with pytest.raises(WorkplaceError, match=rf"machine b: cannot listen on 127.0.0.1:{first.port}: the port is in use"):
        Wire("b", bundles["b"], {"a": "a", "b": "b"}, Stop(), bind=f"127.0.0.1:{first.port}", **LIMITS)
    first.close()


# -- native, router ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_all_reduce_is_the_sum_and_the_same_bits_everywhere(count: int, dtype: torch.dtype) -> None:
    names = ["a", "b", "c"][:count]
    made = natives(names, direct=count == 2)
    for size in (1, 5, 10_007):
        values = {name: torch.arange(size).to(dtype) * (place + 1) + place for place, name in enumerate(names)}
        expected = sum(values.values())
        together([lambda name=name, value=value: made[name].all_reduce(names, value) for name, value in values.items()])
        assert all(torch.equal(value, expected) for value in values.values())  # whole numbers: exact in any order
    together([channel.close for channel in made.values()])


def test_a_collective_of_some_members_leaves_the_others_alone() -> None:
    made = natives(("a", "b", "c"))
    values = {name: torch.ones(9) for name in made}
    together([lambda name=name: made[name].all_reduce(("a", "c"), values[name]) for name in ("a", "c")])
    assert [int(values[name][0]) for name in "abc"] == [2, 1, 2]
    with pytest.raises(ProgramError, match="not inside the island"):
        made["a"].all_reduce(("a", "z"), values["a"])
    together([channel.close for channel in made.values()])


def test_the_router_keeps_neighbours_off_the_wire() -> None:
    near, far = LocalHub(["a", "b"]), LocalHub(["a", "c"])
    router = Router("a", ["a", "b"], near.channel("a", Stop()), far.channel("a", Stop()))
    router.send("b", "x", [torch.zeros(3)])
    router.send("c", "x", [torch.zeros(5)])
    assert dict(near.sent_bytes) == {("a", "b"): 12}
    assert dict(far.sent_bytes) == {("a", "c"): 20}
    with pytest.raises(ProgramError, match="would leave the island"):
        router.all_reduce(["a", "c"], torch.zeros(1))
    with pytest.raises(ProgramError, match="no channel to c"):
        Router("a", ["a", "b"], near.channel("a", Stop()), None).send("c", "x", [])


# -- shaping -----------------------------------------------------------------------------------------------------------


def test_a_bucket_passes_bytes_at_its_rate_whoever_asks(tmp_path: Path) -> None:
    """Two handles stand for two processes: what one takes delays the other, and nothing is lost or counted twice."""
    one, two = (Buckets(tmp_path / "links.bin", {"slow": 1000, "fast": 10_000}) for _ in range(2))
    stop = Stop()
    assert one.reserve(["slow"], 500, SECOND, stop) == SECOND + SECOND // 2
    assert two.reserve(["slow"], 500, SECOND, stop) == 2 * SECOND  # behind the first
    assert one.reserve(["fast", "slow"], 1000, SECOND, stop) == 3 * SECOND  # the slowest segment decides
    assert two.reserve(["fast"], 1000, SECOND, stop) == SECOND + SECOND // 5  # and leaves the fast one free meanwhile
    assert two.reserve(["slow"], 1000, 10 * SECOND, stop) == 11 * SECOND  # an idle link saves nothing up
    assert one.passed_bytes() == two.passed_bytes() == {"slow": 3000, "fast": 2000}
    one.close()
    two.close()


def test_flows_that_meet_share_a_segment_chunk_by_chunk(tmp_path: Path) -> None:
    buckets, stop = Buckets(tmp_path / "links.bin", {"road": 1000}), Stop()
    passed = {"p": 0, "q": 0}
    for _ in range(10):
        passed = {flow: buckets.reserve(["road"], 100, before, stop) for flow, before in passed.items()}
    assert passed == {"p": 19 * SECOND // 10, "q": 2 * SECOND}  # alone each had needed one second
    buckets.close()


def road(name: str, latency_ns: int = 0) -> Road:
    return Road(segments=(name,), latency_ns=latency_ns, message_ns=0)


def shaped_locally(folder: Path, capacity: dict[str, int], path: Callable[[str, str], Road],
                   names: Sequence[str]) -> tuple[dict[str, Shaped], Buckets]:
    hub, buckets = LocalHub(names), Buckets(folder / "links.bin", capacity)
    return {name: Shaped(hub.channel(name, Stop()), name, buckets, path, Stop()) for name in names}, buckets


def test_a_message_takes_no_less_than_its_bytes_and_latency(tmp_path: Path) -> None:
    """A lower bound cannot be missed by a busy machine; how closely it is met is measured by benchmarks/transport.py."""
    made, buckets = shaped_locally(tmp_path, {"road": 10_000_000}, lambda s, t: road("road", 30_000_000), ["a", "b"])
    begin = time.monotonic_ns()
    made["a"].send("b", "x", [torch.zeros(1_000_000, dtype=torch.uint8)])
    sent = time.monotonic_ns() - begin
    made["b"].receive("a", "x")
    received = time.monotonic_ns() - begin
    assert sent >= 100_000_000
    assert received >= 130_000_000
    assert buckets.passed_bytes() == {"road": 1_000_000}


def test_two_flows_take_together_what_their_sum_takes(tmp_path: Path) -> None:
    made, buckets = shaped_locally(tmp_path, {"road": 10_000_000}, lambda s, t: road("road"), ["a", "b", "c", "d"])
    ends: dict[str, int] = {}
    begin = time.monotonic_ns()

    def flow(source: str, target: str) -> None:
        made[source].send(target, "x", [torch.zeros(1_000_000, dtype=torch.uint8)])
        ends[source] = time.monotonic_ns() - begin

    together([lambda: flow("a", "b"), lambda: flow("c", "d")])
    assert max(ends.values()) >= 200_000_000
    assert buckets.passed_bytes() == {"road": 2_000_000}


def test_a_slower_road_is_later_and_one_inside_a_machine_is_not_shaped(tmp_path: Path) -> None:
    roads = {("a", "b"): road("slow"), ("a", "c"): road("fast"), ("b", "a"): Road(segments=(), latency_ns=0, message_ns=0)}
    made, buckets = shaped_locally(tmp_path, {"slow": 1_000_000, "fast": 100_000_000}, lambda s, t: roads[s, t],
                                   ["a", "b", "c"])
    took = {}
    for target in ("b", "c"):
        begin = time.monotonic_ns()
        made["a"].send(target, "x", [torch.zeros(100_000, dtype=torch.uint8)])
        took[target] = time.monotonic_ns() - begin
    assert took["b"] > took["c"]
    made["b"].send("a", "y", [torch.ones(3)])
    assert made["a"].receive("b", "y")[0].sum().item() == 3
    assert buckets.passed_bytes() == {"slow": 100_000, "fast": 100_000}


def test_a_native_sum_pays_for_its_ring(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    made, buckets = shaped_locally(tmp_path, dict.fromkeys(names, 10000000),
                                   lambda source, target: road(source, 5_000_000), names)
    values = {name: torch.ones(30_000) for name in names}
    begin = time.monotonic_ns()
    together([lambda name=name: made[name].all_reduce(names, values[name]) for name in names])
    took = time.monotonic_ns() - begin
    assert all(torch.equal(value, torch.full((30_000,), 3.0)) for value in values.values())
    assert buckets.passed_bytes() == dict.fromkeys(names, 2 * 2 * 120000 // 3)
    assert took >= 16_000_000 + 4 * 5_000_000


def test_shaping_stops_when_the_run_stops(tmp_path: Path) -> None:
    made, _ = shaped_locally(tmp_path, {"road": 1000}, lambda s, t: road("road"), ["a", "b"])
    stop = made["a"]._stop
    threading.Timer(0.1, lambda: stop.set("enough")).start()
    with pytest.raises(StoppedError, match="enough"):
        made["a"].send("b", "x", [torch.zeros(1_000_000, dtype=torch.uint8)])
