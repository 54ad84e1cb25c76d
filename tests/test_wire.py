"""The bytes between judge and worker: what is sent arrives, and no message crashes the reader or makes it allocate."""

import json
import math
import socket
import struct
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_lab.formats import E4M3, E8M0, FP32, Format
from lowprec_lab.graders.case import type_problem
from lowprec_lab.grading import wire
from lowprec_lab.grading.wire import HEADER_LIMIT, RAW_LIMIT, Foreign, WireError, pack, receive, send, unpack

LENGTHS = struct.Struct("<IQ")
DTYPES = list(wire._DTYPES.values())


def there_and_back(value):
    return unpack(*pack(value))


def same(left, right):
    """Whether two values are the same data, NaNs, signs of zero, strides and all."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and raw_bytes(left) == raw_bytes(right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (math.isnan(left) and math.isnan(right))
    return left == right


def raw_bytes(value):
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1), (0, 1)])
def test_an_expanded_tensor_arrives(shape, dtype):
    value = torch.ones((), dtype=dtype).expand(shape)
    for sent in (value, value.clone()):
        back = there_and_back(sent)
        assert (back.dtype, back.shape) == (dtype, shape)
        assert torch.equal(back, value)


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**4000), 2**4000), st.floats(), st.text(st.characters(codec="utf-8"))
)
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    count = math.prod(shape)
    if dtype is torch.bool:
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).permute(draw(st.permutations(range(len(shape)))))


DATA = st.recursive(
    st.one_of(NUMBERS, tensors(), st.sampled_from([FP32, E4M3, E8M0, torch.float32, torch.float8_e5m2])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(DATA)
def test_what_is_packed_is_unpacked(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_every_dtype_and_shape(dtype, shape):
    value = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    assert same(there_and_back(value), value)


def test_bits_of_nans_and_zeros_survive():
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0], dtype=torch.int32)
    assert torch.equal(there_and_back(bits.view(torch.float32)).view(torch.int32), bits)
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back((math.inf, -math.inf, 5e-324)) == (math.inf, -math.inf, 5e-324)


def test_strides_survive():
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert there_and_back(transposed).stride() == transposed.stride()
    assert there_and_back(torch.arange(6.0)[::2]).tolist() == [0, 2, 4]
    assert there_and_back(torch.ones(1).expand(3, 4)).tolist() == [[1.0] * 4] * 3


def test_conjugates_and_gradients_are_values():
    value = torch.tensor([1 + 2j]).conj()
    assert there_and_back(value).resolve_conj().tolist() == [1 - 2j]
    assert not there_and_back(torch.ones(2, requires_grad=True) * 2).requires_grad


def test_a_format_keeps_its_dtype():
    assert there_and_back(E4M3) == E4M3
    assert there_and_back(E4M3).torch_dtype is torch.float8_e4m3fn
    assert there_and_back(Format("mine", 3, 2)).torch_dtype is None


@pytest.mark.parametrize(
    ("value", "name"),
    [(np.arange(3), "ndarray"), (np.float64(1), "float64"), (torch.nn.Parameter(torch.ones(1)), "Parameter"),
     (np.int8(1), "int8")],
)  # fmt: skip
def test_a_value_of_another_type_arrives_as_its_types_name(value, name):
    arrived = there_and_back(value)
    assert isinstance(arrived, Foreign)
    assert type(arrived).__name__ == name
    assert type_problem(arrived, torch.ones(1)) == type_problem(value, torch.ones(1))


def deep(levels, kind=list):
    value = kind()
    for _ in range(levels):
        value = kind([value])
    return value


@pytest.mark.parametrize(
    "value",
    [print, object(), {1: 2}, {"a": object()}, set(), 1j, b"x", 2**5000, deep(9), [None] * 10_001,
     torch.ones(2).to_sparse(), torch.empty(2, device="meta"), Ellipsis, iter([])],
)  # fmt: skip
def test_what_is_no_data_is_not_sent(value):
    with pytest.raises(TypeError):
        pack(value)


# --- messages that lie ------------------------------------------------------------------------------------------------


def tensor(**changes):
    entry = {"dtype": "float32", "shape": [2], "order": [0], "at": 0, "size": 8} | changes
    return {"tensor": {key: value for key, value in entry.items() if value != "absent"}}


def test_the_message_that_the_lies_are_made_from_is_a_good_one():
    assert unpack(json.dumps(tensor()).encode(), bytes(8)).tolist() == [0.0, 0.0]


LIES = {
    "a negative shape": tensor(shape=[-2]),
    "two negative lengths": tensor(shape=[-1, -2], order=[0, 1]),
    "a giant shape": tensor(shape=[2**40]),
    "a shape beyond int64": tensor(shape=[2**64]),
    "a giant shape of nothing": tensor(shape=[0, 2**62, 2**62], order=[0, 1, 2], size=0),
    "NaN as length": tensor(shape=[math.nan]),
    "infinity as length": tensor(shape=[math.inf]),
    "a length of 2.0": tensor(shape=[2.0]),
    "a length of true": tensor(shape=[True], size=4),
    "a text as shape": tensor(shape="2"),
    "an object as shape": tensor(shape={"0": 2}),
    "no shape": tensor(shape=None),
    "17 dimensions": tensor(shape=[1] * 16 + [2], order=list(range(17))),
    "an order that is none": tensor(order=[1]),
    "an order with a gap": tensor(shape=[1, 2], order=[0, 2]),
    "an order with a repetition": tensor(shape=[1, 2], order=[0, 0]),
    "an order of floats": tensor(order=[0.0]),
    "an order of booleans": tensor(order=[False]),
    "an order too short": tensor(order=[]),
    "a size too small": tensor(size=4),
    "a size too large": tensor(size=16),
    "a negative size": tensor(size=-8),
    "a size of NaN": tensor(size=math.nan),
    "a size of 8.0": tensor(size=8.0),
    "bytes that were not sent": tensor(shape=[4], size=16),
    "bytes before the start": tensor(at=-8),
    "bytes behind the end": tensor(at=8),
    "a place of 0.0": tensor(at=0.0),
    "overlapping tensors": {"list": [tensor(), tensor()]},
    "a tensor twice": {"list": [tensor(shape=[1], size=4), tensor(shape=[2], at=0)]},
    "an unknown dtype": tensor(dtype="float3"),
    "a dtype that is a list": tensor(dtype=[1]),
    "no dtype": tensor(dtype="absent"),
    "no place": tensor(at="absent"),
    "a tensor that is a list": {"tensor": [1, 2]},
    "a tensor that is a text": {"tensor": "elsewhere"},
    "a bare number": 3,
    "a bare float": 0.5,
    "a bare list": [1],
    "two kinds at once": {"int": "1", "float": "nan"},
    "no kind": {},
    "an unknown kind": {"pickle": "gASVAAAA"},
    "an int that is a number": {"int": 3},
    "an int that is a word": {"int": "three"},
    "an int of a million digits": {"int": "9" * 1_000_000},
    "a float that is a word": {"float": "1.5.5"},
    "a float beyond all": {"float": "0x1p999999999"},
    "a float that is a list": {"float": ["inf"]},
    "a dtype of no name": {"dtype": None},
    "a format without fields": {"format": {}},
    "a format that is a list": {"format": [1]},
    "a format with one more": {"format": {"name": "x", "dtype": None, "more": 1}},
    "a foreign type with a tag": {"foreign": "<script>"},
    "a foreign type of no text": {"foreign": 3},
    "a foreign type that is long": {"foreign": "x" * 1000},
    "a list that is a dict": {"list": {"0": 1}},
    "a list that is too long": {"list": [None] * 10_001},
    "a dict that is a list": {"dict": []},
    "a nest": {"list": [{"list": [{"list": [{"list": [{"list": [{"list": [{"list": [{"list": [{"list": [{"list": [
        {"list": []}]}]}]}]}]}]}]}]}]}]},
}  # fmt: skip


@pytest.mark.parametrize("message", LIES.values(), ids=LIES)
def test_a_lie_is_refused(message):
    with pytest.raises(WireError):
        unpack(json.dumps(message).encode(), bytes(8))


def format_lie(**changes):
    fields = {"name": "x", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "specials": "fn"}
    fields |= {"signed": True, "subnormals": True, "dtype": None}
    return {"format": fields | changes}


@pytest.mark.parametrize(
    "changes",
    [{"exponent_bits": 10**9}, {"exponent_bits": True}, {"exponent_bits": -3}, {"bias": 10**4000}, {"bias": None},
     {"specials": ["fn"]}, {"specials": "all"}, {"signed": 1}, {"subnormals": "no"}, {"name": 3}, {"name": "x" * 9999},
     {"dtype": "float3"}, {"dtype": {}}],
    ids=str,
)  # fmt: skip
def test_a_format_that_cannot_exist_is_refused(changes):
    began = time.perf_counter()
    with pytest.raises(WireError):
        unpack(json.dumps(format_lie(**changes)).encode(), b"")
    assert time.perf_counter() - began < 1
    assert isinstance(unpack(json.dumps(format_lie()).encode(), b""), Format)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"\xff\xfe", b"nul", b"NaN", b"1e999", b"9" * 100_000, b"[" * HEADER_LIMIT, b'{"list":[' * 400_000,
     b'"\\ud800', b'{"tensor":' * 100_000 + b"1" + b"}" * 100_000],
    ids=lambda header: repr(header[:12]),
)  # fmt: skip
def test_a_header_that_is_no_json_is_refused(header):
    with pytest.raises(WireError):
        unpack(header, b"")


def test_bytes_that_are_no_bools_become_bools():
    arrived = unpack(json.dumps(tensor(dtype="bool", shape=[4], size=4)).encode(), b"\x00\x01\x02\xff")
    assert arrived.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_nothing_is_allocated_beyond_what_was_sent():
    giant = json.dumps(tensor(shape=[2**28], size=2**30)).encode()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack(giant, bytes(8))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=400, deadline=None)
@given(DATA, st.data())
def test_a_message_with_changed_bytes_is_data_or_refused(value, data):
    header, raw = pack(value)
    header = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(header) - 1))
        header[place] = data.draw(st.sampled_from(list(b'0123456789-.eE{}[]":,ntf')))
    cut = data.draw(st.integers(0, len(raw)))
    for part in (raw, raw[:cut], raw + b"more"):
        try:
            arrived = unpack(bytes(header), part)
        except WireError:
            continue
        pack(arrived) if not contains_foreign(arrived) else None


def contains_foreign(value):
    if isinstance(value, (tuple, list)):
        return any(map(contains_foreign, value))
    if isinstance(value, dict):
        return any(map(contains_foreign, value.values()))
    return isinstance(value, Foreign)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["tensor", "list", "tuple", "dict", "int", "float", "format", "dtype", "foreign", "shape"]),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=400, deadline=None)
@given(JSON, st.binary(max_size=32))
def test_any_json_is_data_or_refused(message, raw):
    try:
        unpack(json.dumps(message).encode(), raw)
    except WireError:
        return


# --- over a socket ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon(seconds=5.0):
    return time.monotonic() + seconds


def test_messages_arrive_one_by_one(pair):
    ours, theirs = pair
    for value in ("one", torch.arange(5), {"ok": (1.5, None)}):
        send(theirs, value, soon())
    assert receive(ours, soon()) == "one"
    assert receive(ours, soon()).tolist() == [0, 1, 2, 3, 4]
    assert receive(ours, soon()) == {"ok": (1.5, None)}


def test_a_large_message_arrives(pair):
    ours, theirs = pair
    value = torch.arange(4_000_000, dtype=torch.float64)
    sender = threading.Thread(target=send, args=(theirs, value))
    sender.start()
    assert torch.equal(receive(ours, soon(20)), value)
    sender.join()


@pytest.mark.parametrize(
    ("header", "raw"), [(HEADER_LIMIT + 1, 0), (0, RAW_LIMIT + 1), (2**32 - 1, 2**64 - 1)], ids=str
)
def test_an_announcement_that_is_too_large_is_refused_at_once(pair, header, raw):
    ours, theirs = pair
    theirs.sendall(LENGTHS.pack(header, raw))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="too large"):
            receive(ours, soon())
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


def test_a_length_that_nothing_follows_allocates_nothing(pair):
    ours, theirs = pair
    theirs.sendall(LENGTHS.pack(HEADER_LIMIT, RAW_LIMIT) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            receive(ours, soon(0.2))
        assert caught.value.late
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20  # what the socket may give at once, and little more
    finally:
        tracemalloc.stop()


def test_a_message_byte_by_byte_does_not_stretch_the_time(pair):
    ours, theirs = pair
    done = threading.Event()

    def trickle():
        while not done.wait(0.05):
            theirs.send(b"\0")

    trickler = threading.Thread(target=trickle)
    trickler.start()
    began = time.monotonic()
    with pytest.raises(WireError) as caught:
        receive(ours, soon(0.3))
    done.set()
    trickler.join()
    assert caught.value.late
    assert time.monotonic() - began < 1


def test_a_side_that_hangs_up_is_gone_not_late(pair):
    ours, theirs = pair
    theirs.sendall(LENGTHS.pack(100, 0) + b"half")
    theirs.close()
    with pytest.raises(WireError) as caught:
        receive(ours, soon())
    assert not caught.value.late
    with pytest.raises(WireError):
        send(ours, "anybody?", soon())


def test_a_side_that_does_not_listen_is_late(pair):
    ours, _ = pair
    with pytest.raises(WireError) as caught:
        send(ours, torch.zeros(2**20), soon(0.2))
    assert caught.value.late


def test_more_than_a_message_may_hold_is_not_sent(pair):
    ours, _ = pair
    with pytest.raises(TypeError, match="more data"):
        send(ours, torch.zeros(RAW_LIMIT + 1, dtype=torch.uint8), soon())
