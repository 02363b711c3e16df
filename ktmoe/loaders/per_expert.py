"""PerExpert: a loader for checkpoints that have tensors of their own for every expert. A Scheme says what each matrix is."""

from __future__ import annotations

from collections.abc import Iterable

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import model_config, naming, quantization
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.scheme import Endings, Headers, Scheme
from ktmoe.matrix import Matrix
from ktmoe.weights.activation import GatedActivation


def spellings(
    stored: Iterable[Endings], stems: Iterable[dict[str, str]] = (naming.PROJ_STEMS, naming.NUMBERED_STEMS), module: str = ""
) -> tuple[naming.Spelling, ...]:
    """The names of experts' tensors with these endings; by default with transformers' stems, and with Mixtral's.

    stems, module: Spelling's.
    """
    return tuple(
        naming.Spelling(
            of_projections,
            endings.required,
            optional=endings.optional,
            unused=endings.unused,
            foreign={"bias": "biases are not supported", **endings.refused},
            module=module,
            arrays=endings.arrays,
        )
        for endings in stored
        for of_projections in stems
    )


class PerExpert(Loader):
    """Reads experts whose matrices are what a scheme says.

    scheme: of each matrix. owner: whose names these are, for messages. spelled: the names; by default, spellings() of what the
    scheme has.
    num_experts is what the tensor names say; config.json must agree with it where it gives it, see naming.
    """

    scheme: Scheme

    def __init__(self, scheme: Scheme, owner: str, spelled: Iterable[naming.Spelling] | None = None):
        self.scheme = scheme
        self.names = naming.Names(owner, *(spellings(scheme.stored) if spelled is None else spelled))

    def activation(self, checkpoint: Checkpoint) -> GatedActivation:
        """The activation, by config.json. Raises FormatError, CheckpointError."""
        return model_config.activation(checkpoint)

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Raise FormatError for what config.json says and this loader does not read."""
        self.scheme.check_config(checkpoint)

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has tensors of these names, dtypes and shapes, else 0.

        Raises FormatError if it has these names and these dtypes of codes, but is not what the scheme's format() wants.
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            if not self.scheme.reads(Headers(checkpoint, prefix + spelling.stems["gate"], spelling.arrays)):
                return 0.0
            try:
                self.check_headers(checkpoint, spelling, prefix)
            except FormatError:
                self.check_config(checkpoint)  # 8 bits where 4 are read say more than the shapes that follow from them
                raise
            return 0.9

        return self.names.detect(checkpoint, score, refused=None)

    def check_headers(self, checkpoint: Checkpoint, spelling: naming.Spelling, prefix: str) -> None:
        """Raise FormatError for an expert whose headers are not what the scheme says. prefix: what comes before its stems."""
        down = prefix + spelling.stems["down"]
        matrices = [Headers(checkpoint, prefix + stem, spelling.arrays, down) for stem in spelling.stems.values()]
        weight_format = self.scheme.format(matrices[0])
        for headers in matrices:
            self.scheme.check_dtypes(headers, weight_format)
            self.scheme.shape(headers, weight_format)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return self.names.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for tensors of another
        format; CheckpointError for experts of different shapes, and for a config.json that contradicts the tensors.
        """
        return self.load_place(self.names.locate(checkpoint, layer))

    def load_place(self, place: naming.Place) -> ExpertWeights:
        """What load() gives, for a layer that has been found."""
        checkpoint, arrays, scheme = place.checkpoint, place.spelling.arrays, self.scheme
        quantization.check_transforms(checkpoint)
        self.check_config(checkpoint)
        down = place.name("down", 0)
        weight_format = scheme.format(Headers(checkpoint, place.name("gate", 0), arrays, down))

        def check(name: str) -> tuple[int, int]:
            headers = Headers(checkpoint, name, arrays, down)
            scheme.check_dtypes(headers, weight_format)
            shape = scheme.shape(headers, weight_format)
            scheme.check_more(headers, place.endings, shape)
            return shape

        shapes = place.shapes(check)

        def read(expert: int, projection: str) -> Matrix:
            headers = Headers(checkpoint, place.name(projection, expert), arrays)
            return scheme.read(headers, weight_format, shapes[projection], place.endings)

        activation, router_weight = self.activation(checkpoint), model_config.router_weight(checkpoint, place.base)
        return ExpertWeights(place.num_experts, *shapes["down"], read, weight_format, activation, place.base, router_weight)
