"""A matrix by its name, whoever's it is: which scheme's tensors stand behind the name, and what their headers say."""

from __future__ import annotations

import re
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ktmoe.errors import CheckpointError, FormatError, InputError, KtmoeError, MissingTensorError, UnavailableError
from ktmoe.loaders import checks, model_config, quantization, registry, unknown
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.scheme import FACTORS, Endings, Headers, Scheme, float32
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat

_BIAS = ".bias"
#: Endings of scales for the keys and values that a projection gives to a cache. They say nothing of its weights.
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".output_scale")
#: DeepSeek's own name of a router. Its bias takes part in the choice of experts alone, and is not added to the product.
_ROUTER = re.compile(r"(?:.*\.)?(?:layers|mtp)\.[0-9]+\.ffn\.gate")
#: The last parts of names of output layers, of input embeddings, and of other tables of which a token reads rows.
_OUTPUTS = {"lm_head", "head", "output", "output_layer", "embed_out"}
_INPUTS = {"embed_tokens", "embed", "tok_embeddings", "token_embd", "wte", "word_embeddings", "embeddings", "embed_in"}
_TABLES = {"wpe", "position_embd", "per_layer_token_embd", "embed_tokens_per_layer", "embed_positions"}
#: How many tensors a message lists.
_LISTED = 4

#: The sorted names of a checkpoint's tensors.
_names: weakref.WeakKeyDictionary[Checkpoint, list[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix whose headers have been checked; its bytes have not been read.

    name: what its tensors' names begin with. format, shape: the Matrix's. has_bias: whether it has one.
    read: reads it, from any thread. It raises FormatError for bytes that are not what their headers promise, CheckpointError.
    whole, rows: where it is some rows [first, last) of a stored matrix, that one and these.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    has_bias: bool
    read: Callable[[], Matrix] = field(repr=False)
    whole: StoredMatrix | None = None
    rows: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix's arrays, without the bias."""
        return self.format.nbytes(*self.shape)


def check_name(what: str, name: object) -> None:
    """Raise InputError for a name that is no str. what: the argument's name."""
    if not isinstance(name, str):
        raise InputError(f"{what} must be a str, found {show(name)}")


def is_table(name: str) -> bool:
    """Whether a matrix is an embedding, of which a token reads some rows, by the last part of its name."""
    return _last(name) in _INPUTS | _TABLES


def bases(checkpoint: Checkpoint) -> Iterator[str]:
    """The names that have two-dimensional codes of some scheme's, in the order of the tensors' names; each once."""
    codes = {stored.arrays["codes"] for of in _schemes("auto").values() for stored in of.stored}
    found = set()
    for name in checkpoint.names():
        base, dot, last = name.rpartition(".")
        if dot + last in codes and base not in found and len(checkpoint.info(name).shape) == 2:
            found.add(base)
            yield base


def endings(checkpoint: Checkpoint, name: str) -> list[str]:
    """What the names of tensors have behind that name, sorted; each begins with a dot."""
    if checkpoint not in _names:
        _names[checkpoint] = sorted(checkpoint.names())
    names, prefix = _names[checkpoint], f"{name}."
    found = []
    for place in range(bisect_left(names, prefix), len(names)):
        if not names[place].startswith(prefix):
            break
        found.append(names[place][len(name) :])
    return found


def find(checkpoint: Checkpoint, name: str, scheme: str = "auto") -> StoredMatrix:
    """The matrix of that name, by the headers. scheme: a loader's name, or "auto" to go by the tensors.

    Of tensors, only compressed-tensors' weight_shape is read, which says how many bits a code has.

    Raises MissingTensorError if it has no tensors, or not all of them; FormatError for tensors that are not what a scheme says,
    for one beside them that would change what they mean, and where several schemes read them, but not alike; CheckpointError;
    UnavailableError for tensors that no scheme knows; UnknownNameError for a loader that there is not.
    """
    there = endings(checkpoint, name)
    if not there:
        raise MissingTensorError(
            f"{checkpoint.path}: matrix {show(name)}: expected tensors of this name, found {_near(checkpoint, name)}"
        )
    candidates = _candidates(checkpoint, name, there, scheme)
    if not candidates:
        raise UnavailableError(
            f"{checkpoint.path}: matrix {show(name)}: {_reader(scheme)} knows such tensors. Found "
            f"{_listed(checkpoint, name, there)}{unknown.method(checkpoint)}"
        )
    found: dict[str, StoredMatrix] = {}
    refused: dict[str, KtmoeError] = {}
    for loader, of, stored in candidates:
        try:
            found.setdefault(loader, _checked(checkpoint, name, there, of, stored))
        except (CheckpointError, FormatError) as error:
            refused.setdefault(str(error), error)
    first = next(iter(found.values()), None)
    if first is None:
        raise _refusal(checkpoint, name, list(refused.values()))
    if any(each.format != first.format for each in found.values()):
        formats = " or ".join(f"{each.format.description} ({loader})" for loader, each in found.items())
        raise FormatError(f"{name}: expected tensors of one meaning, found {formats}: pass scheme=... to choose one")
    return first


def _schemes(scheme: str) -> dict[str, Scheme]:
    """By loaders' names: of all that have one, or of that loader. A plugin's may be anything."""
    loaders = {name: registry.get(name) for name in (registry.names() if scheme == "auto" else [scheme])}
    found = {name: getattr(loader, "scheme", None) for name, loader in loaders.items()}
    return {name: of for name, of in found.items() if isinstance(of, Scheme)}


def _candidates(checkpoint: Checkpoint, name: str, there: list[str], scheme: str) -> list[tuple[str, Scheme, Endings]]:
    """(loader's name, its scheme, endings) of those that may be meant: their codes are here, and no others name more tensors.

    Endings that lack a tensor count only where all of their scheme's do.
    """
    found = [
        (loader, of, stored)
        for loader, of in _schemes(scheme).items()
        for stored in of.stored
        if stored.arrays["codes"] in there
    ]
    counts = [len(set(stored.required) & set(there)) for _, _, stored in found]
    most = [each for each, count in zip(found, counts, strict=True) if count == max(counts)]
    whole = {loader for loader, _, stored in most if set(stored.required) <= set(there)}
    most = [each for each in most if each[0] not in whole or set(each[2].required) <= set(there)]
    return [each for each in most if each[1].reads(Headers(checkpoint, name, each[2].arrays))] or most


def _checked(checkpoint: Checkpoint, name: str, there: list[str], scheme: Scheme, stored: Endings) -> StoredMatrix:
    """What the headers say, which are all checked here. Raises MissingTensorError, FormatError, CheckpointError."""
    codes = stored.arrays["codes"]
    if missing := next((ending for ending in stored.required if ending not in there), None):
        raise MissingTensorError(f"{name}{missing}: expected beside {codes.lstrip('.')}, found no such tensor")
    quantization.check_transforms(checkpoint, name)
    scheme.check_config(checkpoint)
    headers = Headers(checkpoint, name, stored.arrays)
    weight_format = scheme.format(headers)
    scheme.check_dtypes(headers, weight_format)
    shape = scheme.shape(headers, weight_format)
    scheme.check_more(headers, there, shape)
    known = {*stored.required, *stored.optional, *stored.unused, *_CACHE, _BIAS}
    if strange := next((ending for ending in there if ending not in known), None):
        why = next((why for foreign, why in stored.refused.items() if strange.endswith(foreign)), "its meaning is not known")
        required = ", ".join(ending.lstrip(".") for ending in stored.required)
        raise FormatError(f"{name}{strange}: expected none beside {required}, found one: {why}")
    has_bias = _BIAS in there
    if has_bias and _ROUTER.fullmatch(name):
        raise FormatError(
            f"{name}{_BIAS}: expected none that is added to the product, found a router's by DeepSeek's names, which corrects "
            "the choice of experts alone"
        )
    if has_bias:
        info = checkpoint.info(name + _BIAS)
        checks.dtype(info, *FACTORS)
        checks.shape(info, shape[:1], "one bias per row")

    def read() -> Matrix:
        bias = None
        if has_bias:
            info = checkpoint.info(name + _BIAS)
            bias = float32(checkpoint.read(info.name, release=True), info)
        return scheme.read(headers, weight_format, shape, there, bias)

    return StoredMatrix(name, weight_format, shape, has_bias, read)


def _refusal(checkpoint: Checkpoint, name: str, errors: list[KtmoeError]) -> KtmoeError:
    """One error of those that all schemes gave: the missing tensor, if there is one, is what a user can do something about."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = MissingTensorError if MissingTensorError in kinds else kinds.pop() if len(kinds) == 1 else FormatError
    return kind(
        f"{checkpoint.path}: matrix {show(name)}: no scheme reads its tensors: {'; '.join(map(str, errors))}"
        f"{unknown.method(checkpoint)}"
    )


def _reader(scheme: str) -> str:
    return "no scheme" if scheme == "auto" else f"no scheme of loader {scheme!r}"


def _listed(checkpoint: Checkpoint, name: str, there: list[str]) -> str:
    found = [f"{name}{ending} {checks.describe(checkpoint.info(name + ending))}" for ending in there[:_LISTED]]
    return ", ".join(found) + (f" and {len(there) - _LISTED} more" if len(there) > _LISTED else "")


def _near(checkpoint: Checkpoint, name: str) -> str:
    """What is there instead of a name's tensors."""
    base, _, ending = name.rpartition(".")
    if name in checkpoint:
        return f"one tensor that is called so: the matrix is {show(base)}" if ending == "weight" else "one that is called so"
    beside = list(dict.fromkeys(other.split(".")[1] for other in endings(checkpoint, base))) if base else []
    if beside:
        return f"{', '.join(map(show, beside[:8]))} in {show(base)}"
    others = f"{len(checkpoint)} others"
    if _last(name) in _OUTPUTS and model_config.value(checkpoint, "tie_word_embeddings") is not False:
        of_weights = (other.removesuffix(".weight") for other in checkpoint.names() if other.endswith(".weight"))
        if table := next((other for other in of_weights if _last(other) in _INPUTS), None):
            return f"{others}: the input embedding is the output layer, too: ask for {show(table)}"
    return others


def _last(name: str) -> str:
    return name.rpartition(".")[2]
