"""Linear and LinearGroup on what they cannot take: every message names the thing, what was expected and what was found."""

import copy
import inspect
import pickle
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from helpers import B16, BF16, same_bits, unaligned
from linears import random_matrix, random_x

from ktmoe import MXFP4, Linear, LinearGroup, Matrix, MoELayer, backends, fp8
from ktmoe.backends.base import PackedMatrix
from ktmoe.errors import ClosedError, FormatError, InputError, NotCopyableError, UnavailableError, UnknownNameError

TOKENS, N, K = 3, 70, 64


@pytest.fixture(scope="module")
def linear():
    with Linear(random_matrix(np.random.default_rng(1), N, K, name="q_proj"), "fp32_lut") as linear:
        yield linear


@pytest.fixture
def x():
    return random_x(np.random.default_rng(2), TOKENS, K)


def zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


def frozen(array):
    array.flags.writeable = False
    return array


KINDS_OF_X = r"bfloat16.*uint16.*float32.*torch"
#: argument, its bad value, what the message must say
FORWARD = [
    ("x", zeros(TOKENS, K - 1), r"x must have shape \[any, 64\], found \[3, 63\]"),
    ("x", zeros(K), r"x must have shape \[any, 64\], found \[64\]"),
    ("x", zeros(TOKENS, K, dtype=np.float64), rf"x must be {KINDS_OF_X}.*found an array of float64"),
    ("x", zeros(TOKENS, K, dtype=">f4"), rf"x must be {KINDS_OF_X}.*found an array of >f4"),
    ("x", zeros(TOKENS, K, dtype=ml_dtypes.float8_e4m3fn), rf"x must be {KINDS_OF_X}.*found an array of float8_e4m3fn"),
    ("x", [[0.0] * K], rf"x must be {KINDS_OF_X}.*found list"),
    ("x", None, rf"x must be {KINDS_OF_X}.*found NoneType"),
    ("out", zeros(TOKENS, N + 1), r"out must have shape \[3, 70\], found \[3, 71\]"),
    ("out", zeros(TOKENS + 1, N, dtype=np.float32), r"out must have shape \[3, 70\], found \[4, 70\]"),
    ("out", zeros(TOKENS, N, dtype=np.uint16), r"out must be of x's kind, a bfloat16 array, or float32; found a uint16 array"),
    ("out", zeros(TOKENS, N, dtype=int), rf"out must be {KINDS_OF_X}.*found an array of int64"),
    ("out", zeros(TOKENS, 2 * N)[:, ::2], r"out must be C-contiguous, aligned and writeable; found strides"),
    ("out", zeros(N, TOKENS).T, r"out must be C-contiguous, aligned and writeable; found strides"),
    ("out", unaligned(zeros(TOKENS, N)), r"out must be C-contiguous, aligned and writeable; found .*aligned False"),
    ("out", frozen(zeros(TOKENS, N)), r"out must be C-contiguous, aligned and writeable; found .*writeable False"),
    ("out", "y", rf"out must be {KINDS_OF_X}.*found str"),
    ("dtype", np.float64, r"dtype must be None or float32, found <class 'numpy.float64'>"),
    ("dtype", BF16, r"dtype must be None or float32, found dtype\(bfloat16\)"),
    ("dtype", 7, r"dtype must be None or float32, found 7"),
    ("dtype", float, r"dtype must be None or float32, found <class 'float'>"),
    ("dtype", ">f4", r"dtype must be None or float32, found '>f4'"),
    ("dtype", "torch.float32", r"dtype must be None or float32, found 'torch.float32'"),
    ("dtype", zeros(1, dtype=np.float32), r"dtype must be None or float32, found .*array"),
]


@pytest.mark.parametrize(("argument", "value", "message"), FORWARD, ids=[f"{case[0]}-{i}" for i, case in enumerate(FORWARD)])
def test_arguments(linear, x, argument, value, message):
    with pytest.raises(InputError, match=message):
        linear.forward(**{"x": x, argument: value})
    linear.forward(x)  # and nothing is broken


def test_dtype_and_out_together(linear, x):
    """What out is wins over nothing: it has to be what dtype says."""
    with pytest.raises(InputError, match="out must be of float32, as dtype is; found bfloat16 array"):
        linear.forward(x, zeros(TOKENS, N), np.float32)
    with pytest.raises(InputError, match="dtype must be None or float32, found 'bfloat16'"):
        linear.forward(x, zeros(TOKENS, N), "bfloat16")
    for dtype in (np.float32, np.dtype(np.float32), "float32"):
        assert linear.forward(x, zeros(TOKENS, N, dtype=np.float32), dtype).dtype == np.float32
        assert linear.forward(x, dtype=dtype).dtype == np.float32


def test_dtypes_of_torch(linear, x, monkeypatch):
    """Its float32 is float32, for arrays of numpy's, too; what only says so is not."""

    class Named:
        def __str__(self):
            return "torch.float32"

    torch = types.SimpleNamespace(float32=Named(), Tensor=type("Tensor", (), {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert same_bits(linear.forward(x, dtype=torch.float32), linear.forward(x, dtype=np.float32))
    with pytest.raises(InputError, match="dtype must be None or float32, found"):
        linear.forward(x, dtype=Named())


def test_dtypes_without_torch(linear, x, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert linear.forward(x, dtype="float32").dtype == np.float32


def test_out_that_overlaps_x():
    """By one number at either end; also where the shapes are equal: y is no x that may be written over."""
    with Linear(random_matrix(np.random.default_rng(3), K, K), "fp32_lut") as square:
        memory = zeros(2 * TOKENS * K - 1)
        first, second = memory[: TOKENS * K].reshape(TOKENS, K), memory[TOKENS * K - 1 :].reshape(TOKENS, K)
        for x, out in ((first, second), (second, first), (first, first)):
            with pytest.raises(InputError, match="out must not overlap x"):
                square.forward(x, out)


def awkward_layouts(array):
    rows, columns = array.shape
    spread = np.zeros((2 * rows, 3 * columns), array.dtype)
    spread[::2, ::3] = array
    yield spread[::2, ::3]
    yield np.asfortranarray(array)
    yield array[::-1, ::-1].copy()[::-1, ::-1]
    wide = np.zeros((rows, columns + 1), array.dtype)
    wide[:, 1:] = array
    yield wide[:, 1:]
    yield unaligned(array)
    yield frozen(array.copy())


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_x_of_any_layout_is_read_right(linear, x, dtype):
    x = x.astype(dtype)
    for awkward in awkward_layouts(x):
        assert same_bits(linear.forward(awkward), linear.forward(x))
    repeated = np.broadcast_to(x[0], x.shape)
    assert same_bits(linear.forward(repeated), linear.forward(repeated.copy()))


# Making one


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounding": "up"}, InputError, r"rounding must be one of \('exact', 'folded'\), found 'up'"),
        ({"tuned_for": "speed"}, InputError, r"tuned_for must be one of \('decode', 'prefill'\), found 'speed'"),
        ({"backend": "none"}, UnknownNameError, "none"),
        ({"activations": "int7"}, UnavailableError, "activations must be one of .*found 'int7'"),
        ({"numa_nodes": [0, 0]}, InputError, "numa_nodes must be different nodes"),
    ],
    ids=str,
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        Linear(random_matrix(np.random.default_rng(4), N, K), **{"backend": "fp32_lut"} | options)


@pytest.mark.parametrize("thing", [None, zeros(N, K), "q_proj"], ids=["None", "array", "str"])
def test_what_is_no_matrix(thing):
    for make in (Linear, lambda thing: LinearGroup.of_rows(thing, 2)):
        with pytest.raises(InputError, match=r"matrix must be a ktmoe.Matrix, found .*ktmoe.load_matrix"):
            make(thing)


@pytest.mark.parametrize("make", [Linear.from_checkpoint, LinearGroup.of_rows], ids=["from_checkpoint", "of_rows"])
def test_other_ways_to_make_one_take_what_linear_takes(make):
    """With the same defaults; but for arenas, which a user's cache= gives."""
    own, of_linear = (dict(inspect.signature(each).parameters) for each in (make, Linear))
    options = {name: given for name, given in of_linear.items() if name not in ("matrix", "arenas")}
    assert {name: own[name] for name in options} == options
    assert not {"arenas", "options"} & own.keys()


def test_a_number_that_is_none():
    matrix = random_matrix(np.random.default_rng(5), N, K, name="k_proj")
    matrix.scales[69, 1] = 255
    with pytest.raises(FormatError, match=r"k_proj: scale \[69, 1\] is byte 255, which is NaN or infinite"):
        Linear(matrix, "fp32_lut")


def test_memory_that_is_not_there(monkeypatch):
    """It is asked for before anything is packed."""
    monkeypatch.setattr("ktmoe.machine.memory.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"q_proj.* needs .* of memory, .* is available"):
        Linear(random_matrix(np.random.default_rng(6), 2048, 2048, name="q_proj"), "fp32_lut")


# Groups


def test_linears_that_do_not_fit_together(linear):
    rng = np.random.default_rng(7)
    wide, twin = random_matrix(rng, N, 96, name="wide"), random_matrix(rng, N, K, name="twin")
    with (
        Linear(wide, "fp32_lut") as wider,
        Linear(twin, "fp32_lut", "mxfp8") as rounding,
        Linear(random_matrix(rng, 64, K, name="short"), "fp32_lut") as short,
    ):
        for others, inputs, message in (
            ([wider], "same", "wide: expected as many inputs as q_proj, 64, found .* 96"),
            ([short], "own", r"short: expected the shape of q_proj, \[70, 64\], found \[n, k\] = \[64, 64\]"),
            ([rounding], "same", "twin: activations must be that of q_proj, 'bf16', found 'mxfp8'"),
            ([linear] * 64, "same", "linears must be a sequence of 1 to 64 Linears, found"),
            ([None], "same", "linears must be a sequence of 1 to 64 Linears, found .*None"),
            ([], "mine", r"inputs must be one of \('same', 'own'\), found 'mine'"),
        ):
            with pytest.raises(InputError, match=message):
                LinearGroup([linear, *others], inputs)
    for nothing in ([], None, linear):
        with pytest.raises(InputError, match="linears must be a sequence of 1 to 64 Linears, found"):
            LinearGroup(nothing)


def test_backends_of_a_group(linear):
    others = [name for name in backends.available() if name != "fp32_lut" and backends.get(name).linear]
    if not others:
        pytest.skip("this CPU lacks avx2")
    with (
        Linear(random_matrix(np.random.default_rng(8), N, K), others[0]) as other,
        pytest.raises(InputError, match=f"backend must be that of q_proj, 'fp32_lut', found '{others[0]}'"),
    ):
        LinearGroup([linear, other])


def test_as_many_linears_as_a_call_takes(linear, x):
    """One of them many times."""
    ys = LinearGroup([linear] * 64).forward(x)
    assert len(ys) == 64
    assert all(same_bits(y, linear.forward(x)) for y in ys)


def test_a_group_of_a_matrix_cuts():
    """Rows that cannot be dealt out are refused by what they are, before any is packed; progress is that of all matrices; and
    close() closes every Linear."""
    calls = []
    scales = np.ones((3, 2), np.float32)
    matrix = Matrix("wo_a", fp8(block=(64, 32)), (192, 64), np.zeros((192, 64), np.uint8), scales)
    for count, error, message in (
        (0, InputError, "wo_a: count must be an integer that divides its 192 rows, found 0"),
        (5, InputError, "found 5"),
        (2.0, InputError, r"an integer .* found 2\.0"),
        ("2", InputError, "an integer .* found '2'"),
        (None, InputError, "an integer .* found None"),
        (96, InputError, "wo_a: count must be at most 64, found 96"),
        (6, FormatError, "of 64, found 0 to 32"),
    ):
        with pytest.raises(error, match=message):
            LinearGroup.of_rows(matrix, count, progress=lambda *given: calls.append(given))
        assert not calls
    with LinearGroup.of_rows(matrix, np.int64(3), progress=lambda *given: calls.append(given)) as group:
        assert [linear.shape for linear in group.linears] == [(64, 64)] * 3
        assert calls == sorted(calls)
        assert (calls[-1][0], {total for _, total in calls}) == (calls[-1][1], {3 * group.linears[0].spec.nbytes})
    with pytest.raises(ClosedError, match=r"wo_a\[0:64\]: forward after close"):
        group.forward(np.zeros((1, 3, 64), np.float32))


def test_arguments_of_groups(linear):
    """What an out is called says which one it is."""
    shared = random_x(np.random.default_rng(2), 1, TOKENS * (K + N))[0]
    x, overlapping = shared[: TOKENS * K].reshape(TOKENS, K), shared[TOKENS * K - 1 : -1].reshape(TOKENS, N)
    y = linear.forward(x)
    group, own = LinearGroup([linear, linear]), LinearGroup([linear, linear], "own")
    memory = zeros(2 * TOKENS * N - 1)
    for out, message in (
        ([zeros(TOKENS, N)], r"out must be a sequence of 2 arrays, found"),
        (7, r"out must be a sequence of 2 arrays, found 7"),
        ([None, None], rf"out\[0\] must be {KINDS_OF_X}.*found NoneType"),
        ([zeros(TOKENS, N), zeros(N)], r"out\[1\] must have shape \[3, 70\], found \[70\]"),
        (
            [zeros(TOKENS, N), zeros(TOKENS, N, dtype=np.float32)],
            r"out\[1\] must be of out\[0\]'s dtype, a bfloat16 array; found a float32 array",
        ),
        ([zeros(TOKENS, N), "y"], rf"out\[1\] must be {KINDS_OF_X}.*found str"),
        ([zeros(TOKENS, N), zeros(TOKENS, N, dtype=np.uint16)], r"out\[1\] must be of x's kind, a bfloat16 array"),
        ([zeros(TOKENS, N), zeros(N, TOKENS).T], r"out\[1\] must be C-contiguous, aligned and writeable"),
        ([zeros(TOKENS, N), overlapping], r"out\[1\] must not overlap x"),
        (
            [memory[: TOKENS * N].reshape(TOKENS, N), memory[TOKENS * N - 1 :].reshape(TOKENS, N)],
            r"out\[1\] must not overlap those before it",
        ),
    ):
        with pytest.raises(InputError, match=message):
            group.forward(x, out)
    with pytest.raises(InputError, match=r"x must have shape \[any, 2, 64\], found \[3, 64\]"):
        own.forward(x)
    with pytest.raises(InputError, match=r"out must have shape \[3, 2, 70\], found \[3, 140\]"):
        own.forward(np.stack([x, x], axis=1), zeros(TOKENS, 2 * N))
    outs = [zeros(TOKENS, N), zeros(TOKENS, N)]
    assert group.forward(x, outs) is outs
    assert all(same_bits(out, y) for out in outs)
    out = zeros(TOKENS, 2, N)
    assert own.forward(np.stack([x, x], axis=2).transpose(0, 2, 1), out) is out  # x of another layout
    assert same_bits(np.ascontiguousarray(out[:, 1]), y)


# Closed, copied


def test_closed(x):
    """By itself and in a group: nothing is written."""
    rng = np.random.default_rng(9)
    linear, other = (Linear(random_matrix(rng, N, K, name=name), "fp32_lut") for name in ("q_proj", "k_proj"))
    group = LinearGroup([other, linear])
    linear.close()
    linear.close()
    assert repr(linear).endswith("closed)")
    out = [np.full((TOKENS, N), 7, BF16) for _ in range(2)]
    for call, doing in (
        (lambda: linear.forward(x), "forward"),
        (lambda: linear.submit(x).result(), "forward"),
        (lambda: group.forward(x, out), "forward"),
        (lambda: linear.export(), "export"),
        (lambda: linear.replace(random_matrix(rng, N, K)), "replace"),
    ):
        with pytest.raises(ClosedError, match=rf"q_proj: {doing} after close\(\)"):
            call()
    assert all((each == 7).all() for each in out)
    assert other.forward(x).any()
    other.close()


@pytest.mark.parametrize("copy_it", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_is_not_copied(linear, copy_it):
    with pytest.raises(NotCopyableError, match=r"q_proj: a Linear cannot be copied or pickled.*Linear\.from_checkpoint"):
        copy_it(linear)


# Backends


@pytest.fixture
def plugin(monkeypatch):
    """A backend of fp32_lut's that auto would take first, and that cannot do what a test takes from it."""
    real = backends.get("fp32_lut")

    class Plugin(type(real)):
        rank = 10**6

    made = copy.copy(real)
    made.__class__ = Plugin
    monkeypatch.setattr(backends, "get", lambda name, get=backends.get: made if name == "plugin" else get(name))
    monkeypatch.setattr(backends, "ranked", lambda ranked=backends.ranked: ["plugin", *ranked()])
    return made


def test_a_backend_without_dense_matrices(plugin):
    """ "auto" passes over it; asked for by name, it says so. Experts it still has."""
    plugin.linear = False
    matrix = random_matrix(np.random.default_rng(10), N, K)
    with Linear(matrix) as linear:
        assert linear.backend != "plugin"
    with pytest.raises(
        UnavailableError, match=r"backend 'plugin' .* cannot be used: it computes no dense matrices\. Available"
    ):
        Linear(matrix, "plugin")


class Least(PackedMatrix):
    """What every backend has to have."""

    nbytes = 0

    def forward(self, x, out):
        out[:] = len(x)

    def close(self):
        pass


def test_a_backend_that_packs_into_something_else(plugin):
    """Whatever it is, it is closed, if it can be: its memory would be nobody's."""

    class NoMatrix:
        nbytes, closed = 0, 0

        def close(self):
            self.closed += 1

    class Sizeless(NoMatrix, PackedMatrix):
        nbytes = property()  # hasattr() does not find it

        def forward(self, x, out):
            raise AssertionError

    matrix = random_matrix(np.random.default_rng(11), N, K, name="q_proj")
    closing = [NoMatrix(), Sizeless()]
    for wrong in (None, 7, MoELayer, *closing):
        plugin.pack_linear = lambda *_, wrong=wrong: wrong
        with pytest.raises(
            InputError, match=r"q_proj: what backend 'plugin' packs .* inherit .*PackedMatrix and have nbytes, found"
        ):
            Linear(matrix, "plugin")
    assert [each.closed for each in closing] == [1, 1]


def test_a_backend_with_the_least(plugin, x):
    """It computes, by itself and in groups, and refuses all else in the Linear's name."""
    plugin.pack_linear = lambda *_: Least()
    matrix = random_matrix(np.random.default_rng(12), N, K, name="q_proj")
    with Linear(matrix, "plugin") as linear:
        assert (linear.forward(x, dtype=np.float32) == TOKENS).all()
        for y in LinearGroup([linear, linear]).forward(x.astype(np.float32)):
            assert (y == TOKENS).all()
        assert (LinearGroup([linear, linear], "own").forward(np.zeros((2, 2, K), np.float32)) == 2).all()
        for call, what in ((linear.export, "export a matrix"), (lambda: linear.replace(matrix), "replace a matrix")):
            with pytest.raises(UnavailableError, match=f"backend 'plugin' cannot {what}.*q_proj|q_proj.*cannot {what}"):
                call()


@pytest.mark.parametrize("weight_format", [B16, fp8(), MXFP4], ids=lambda given: given.description)
def test_repr(weight_format):
    matrix = random_matrix(np.random.default_rng(13), N, K, weight_format, name="q_proj")
    about = f"Linear('q_proj', {weight_format.description} [70, 64], fp32_lut, bf16 activations, no NUMA binding"
    with Linear(matrix, "fp32_lut") as linear:
        assert repr(linear) == f"{about})"
        assert repr(LinearGroup([linear], "own")) == "LinearGroup(['q_proj'], inputs='own')"
        assert (linear.shape, linear.format, linear.name) == ((N, K), weight_format, "q_proj")
    assert repr(Linear.__new__(Linear)) == "Linear(not packed)"
