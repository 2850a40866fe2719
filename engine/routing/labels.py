"""Round labels: what every arm would accept at every round that a text could have.

Output never depends on who drafts it, so a text that the target wrote is all that a draft has to be
held against: a round emits as many tokens as the arm's tree has of what the text says next, and one
more. All arms are labelled in one pass: the target runs over the text once; then the draft contexts
grow along the output as they do in an engine, and every arm drafts at every position, several
positions in one call. Oracles (`oracle.py`) and the training of routers are made from these labels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor

from ..attention import PackedRow
from ..draft_tree import DraftTree
from ..drafters.base import Drafter, DraftLimit
from ..drafters.context import DraftContext, draft_context
from ..errors import ContextLengthError, RequestError, SettingsError
from ..features import FeatureBuffer, stack
from ..kv_cache import GRANULE, Extent, Plane
from ..request import Request
from ..sampling import Sampler
from ..sequence import ContextState, SequenceState
from ..stopping import StopChecker
from ..target import Target, TargetBatch
from .base import NONE
from .signals import Signals, read_signals


@dataclass(slots=True)
class RoundLabels:
    """Entry i of every tensor is the round that begins behind i + 1 output tokens, the `position`
    of its `RoundRecord`. (The first output token comes from the prompt and is no round.)

    Attributes:
        id: of the request.
        num_prompt: tokens of the prompt.
        arms: the drafters, in the order of the columns.
        acceptance: `[rounds, arms]`, tokens that a round of the arm adds to the output, the bonus
            token included; never more than the text has left. 1 where the arm is not available.
        drafted: `[rounds, arms]`, nodes of the arm's tree, the root left out.
        entropy, margin, hidden: `[rounds]`, `[rounds]`, `[rounds, hidden]`, float32: what a router
            finds in `SequenceState.signals` before the round.
        surprises: output tokens, the last one left out, that are not the target's likeliest. At
            temperature 0 without penalties there are none, or the text is not the target's own (or
            two logits are as good as equal).
    """

    id: str
    num_prompt: int
    arms: tuple[str, ...]
    acceptance: Tensor
    drafted: Tensor
    entropy: Tensor
    margin: Tensor
    hidden: Tensor
    surprises: int = 0

    @property
    def num_rounds(self) -> int:
        """Positions at which a round may begin."""
        return len(self.acceptance)

    def acceptance_of(self, arms: Sequence[str]) -> Tensor:
        """`[rounds, len(arms)]`; `none` emits one token.

        Raises:
            SettingsError: an arm that was not labelled.
        """
        return self._columns(self.acceptance, arms, 1)

    def drafted_of(self, arms: Sequence[str]) -> Tensor:
        """`[rounds, len(arms)]`; `none` drafts nothing.

        Raises:
            SettingsError: an arm that was not labelled.
        """
        return self._columns(self.drafted, arms, 0)

    def _columns(self, values: Tensor, arms: Sequence[str], of_none: int) -> Tensor:
        if unknown := [arm for arm in arms if arm not in (NONE, *self.arms)]:
            raise SettingsError(
                f"row {self.id!r} has no labels for {', '.join(map(repr, unknown))}; it has them "
                f"for {', '.join(self.arms) or 'no arm'}: label it with these drafters, too"
            )
        plain = torch.full((len(values),), of_none, dtype=values.dtype)
        columns = [plain if arm == NONE else values[:, self.arms.index(arm)] for arm in arms]
        return torch.stack(columns, 1) if columns else values[:, :0]


class RoundLabeller:
    """Labels texts of one target for the arms given.

    What an arm drafts is what it drafts in an engine whose text has come to that position, whoever
    drafted the rounds before, up to rounding (contexts grow in other steps). One kind of arm
    remembers its own rounds: a drafter without a context, like `lookup`, whose draft length follows
    its success. It is labelled as if it had drafted every round of its own up to the last one that
    begins no later than the position, and nothing since: exactly a run of that arm alone at the
    rounds which that run has.

    Args:
        target: the model that wrote the texts.
        drafters: by arm. Neural ones serve one engine or labeller each (build them anew; they may
            share loaded models); the others are left as they are until `finish`.
        max_length: longest prompt and output together; the target's context if None.
        max_draft_nodes: as in `EngineSettings`.
        prefill_chunk: tokens of a text per forward.
        lanes: positions that are drafted in one call. Each holds the drafters' keys and values of a
            whole text.

    Raises:
        SettingsError: a setting below 1, drafters that serve an engine, or more keys and values
            than there is memory for.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        *,
        max_length: int | None = None,
        max_draft_nodes: int = 64,
        prefill_chunk: int = 256,
        lanes: int = 8,
    ) -> None:
        length = target.max_context if max_length is None else min(max_length, target.max_context)
        counts = {"max_length": length, "max_draft_nodes": max_draft_nodes}
        counts |= {"prefill_chunk": prefill_chunk, "lanes": lanes}
        for name, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name}={value!r}: expected an integer of at least 1")
        self.target = target
        self.drafters = dict(drafters)
        self.max_length = length
        self._max_nodes = max_draft_nodes
        self._chunk = prefill_chunk
        self._num_lanes = lanes
        found = {arm: draft_context(drafter) for arm, drafter in self.drafters.items()}
        self._contexts = {arm: context for arm, context in found.items() if context is not None}
        self._networks = {context.name: context for context in self._contexts.values()}
        self._layers = tuple(
            sorted({layer for c in self._networks.values() for layer in c.feature_layers})
        )
        self._cache = target.new_cache(-(-length // GRANULE) * GRANULE)
        scratch = max((c.scratch for c in self._networks.values()), default=0)
        self._stride = length + scratch
        for context in self._networks.values():
            context.bind(target, self._plane(context), full_prefill=False)

    def _plane(self, context: DraftContext) -> Plane:
        positions = self._num_lanes * self._stride
        try:
            return Plane(context.plane_shape, positions, self.target.dtype, self.target.device)
        except (RuntimeError, MemoryError) as error:  # torch raises either, by device and size
            raise SettingsError(
                f"lanes={self._num_lanes} of max_length={self.max_length} need more memory than "
                f"device {self.target.device} gives for the keys and values of {context.name!r}; "
                "lower one of them"
            ) from error

    def label(self, request: Request, output_ids: Sequence[int]) -> RoundLabels:
        """Label every round that `output_ids` could have.

        Args:
            request: the prompt and how the output was made: temperature and seed go into coupled
                drafts, `max_tokens` limits their depth, `recorded_ids` feed `lookup`.
            output_ids: what the target answered, or the beginning of it.

        Raises:
            ContextLengthError: the text is longer than `max_length`.
            RequestError: an empty prompt or output, tokens outside the vocabulary, more output than
                `max_tokens`, a temperature without a seed.
        """
        prompt, output = self._check(request, output_ids)
        count = max(0, len(output) - 1)
        acceptance = torch.ones(count, len(self.drafters), dtype=torch.int64)
        drafted = torch.zeros_like(acceptance)
        labels = RoundLabels(
            request.id,
            len(prompt),
            tuple(self.drafters),
            acceptance,
            drafted,
            torch.zeros(count),
            torch.zeros(count),
            torch.zeros(count, self.target.hidden_size),
        )
        if not count:
            return labels
        lanes = [self._sequence(request, prompt, i) for i in range(min(self._num_lanes, count))]
        self._read(prompt, output, lanes[0], labels)
        self._copy_prompt(lanes)
        limits = [
            DraftLimit(request.sampling.max_tokens - at - 1, self._max_nodes)
            for at in range(1, len(output))
        ]
        for first in range(1, len(output), len(lanes)):
            group = list(zip(lanes, range(first, len(output)), strict=False))
            for lane, at in group:
                lane.tokens = prompt + output[:at]
                lane.num_cached = len(lane.tokens) - 1
            for column, (arm, drafter) in enumerate(self.drafters.items()):
                context = self._contexts.get(arm)
                if context is None:
                    continue
                able = [(lane, at) for lane, at in group if _reaches(context, len(lane.tokens))]
                if not able:
                    continue
                sequences = [lane for lane, _ in able]
                context.consume(sequences)
                trees = drafter.draft(sequences, [limits[at - 1] for _, at in able])
                for (_, at), tree in zip(able, trees, strict=True):
                    acceptance[at - 1, column] = _emitted(tree, output[at:])
                    drafted[at - 1, column] = tree.num_drafted
        for column, (arm, drafter) in enumerate(self.drafters.items()):
            if arm not in self._contexts:
                sequence = self._sequence(request, prompt, 0)
                self._draft_alone(drafter, sequence, output, limits, labels, column)
        return labels

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Let the drafters without a context know a row that is done, as in an engine: those that
        draft from finished rows find it from the next label on.

        Raises:
            RequestError, ContextLengthError: as `label`.
        """
        prompt, output = self._check(request, output_ids)
        for arm, drafter in self.drafters.items():
            if arm not in self._contexts:
                sequence = self._sequence(request, prompt, 0)
                drafter.open(sequence)
                sequence.tokens = prompt + output
                drafter.close(sequence)

    def _check(self, request: Request, output_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        prompt, output = list(map(index, request.prompt_ids)), list(map(index, output_ids))
        params = request.sampling
        if not prompt or not output:
            raise RequestError(
                f"request {request.id!r} has {len(prompt)} prompt tokens and {len(output)} output "
                "tokens; a label needs at least one of each"
            )
        if len(prompt) + len(output) > self.max_length:
            raise ContextLengthError(
                f"request {request.id!r}: {len(prompt)} prompt tokens + {len(output)} output "
                f"tokens exceed max_length={self.max_length}; raise it or leave the row out"
            )
        if len(output) > params.max_tokens:
            raise RequestError(
                f"request {request.id!r}: {len(output)} output tokens, but max_tokens="
                f"{params.max_tokens}; give the request that the output was made with"
            )
        strange = [t for t in (*prompt, *output) if not 0 <= t < self.target.vocab_size]
        if strange:
            raise RequestError(
                f"request {request.id!r}: token {strange[0]} is outside the target's vocabulary of "
                f"{self.target.vocab_size}; was the text made with another tokenizer?"
            )
        if params.temperature > 0 and params.seed is None:
            raise RequestError(
                f"request {request.id!r} has temperature={params.temperature} and no seed; drafts "
                "are coupled to the target's noise, so give the seed of the result "
                "(GenerationResult.seed)"
            )
        return prompt, output

    def _sequence(self, request: Request, prompt: list[int], lane: int) -> SequenceState:
        """The state that drafters see, behind the prompt."""
        params = request.sampling
        return SequenceState(
            request=request,
            # Neither is asked anything: what is chosen and where it ends is in the text.
            sampler=Sampler(
                params,
                vocab_size=self.target.vocab_size,
                prompt_ids=prompt,
                eos_token_ids=self.target.eos_token_ids,
                seed=params.seed or 0,
                device=self.target.device,
            ),
            stop=StopChecker(
                replace(params, stop=()), eos_token_ids=self.target.eos_token_ids, decode=None
            ),
            tokens=list(prompt),
            num_prompt=len(prompt),
            seed=params.seed or 0,
            extent=Extent(lane * self._stride, self._stride),
            contexts={name: ContextState() for name in self._networks},
        )

    # The target's pass -----------------------------------------------------------------------

    def _read(
        self, prompt: list[int], output: list[int], lane: SequenceState, labels: RoundLabels
    ) -> None:
        """Run the target over the text: signals of every round, features for the drafters, and the
        prompt's rows of every draft context, in `lane`."""
        text = prompt + output
        # No round begins behind the last token, and the one before is pending in the last round.
        end_of_text = len(text) - 2
        buffer = FeatureBuffer(self._layers, 0)
        lane.features = buffer
        lane.tokens = text[: len(prompt) + 1]  # row t of a context may depend on token t + 1
        awake = [c for c in self._networks.values() if _reaches(c, len(lane.tokens))]
        signals: list[Signals] = []
        for start in range(0, end_of_text, self._chunk):
            end = min(start + self._chunk, end_of_text)
            batch = TargetBatch()
            wanted = max(0, len(prompt) - 1 - start) if end >= len(prompt) else None
            batch.add(
                PackedRow(0, start, end - start),
                text[start:end],
                range(start, end),
                logits_from=wanted,
            )
            forward = self.target.forward(batch, self._cache, capture=self._layers)
            if self._layers:
                buffer.append(stack(forward.features, self._layers))
            if wanted is not None:
                rows = range(len(batch.logit_rows))
                signals += read_signals(
                    forward.logits, forward.hidden, rows, wanted=frozenset({"entropy", "hidden"})
                )
                said = output[start + wanted - len(prompt) + 1 :][: len(rows)]
                best = forward.logits.argmax(-1).tolist()
                labels.surprises += sum(a != b for a, b in zip(said, best, strict=True))
            lane.num_cached = min(end, len(prompt))
            for context in awake:
                context.consume([lane])
            buffer.release(lane.num_cached)
        labels.entropy = torch.tensor([s.entropy for s in signals])
        labels.margin = torch.tensor([s.margin for s in signals])
        vectors = [s.hidden for s in signals if s.hidden is not None]
        labels.hidden = torch.stack(vectors).float().cpu()

    def _copy_prompt(self, lanes: Sequence[SequenceState]) -> None:
        """Give every lane the context rows of the prompt that the first one has."""
        first = lanes[0]
        for lane in lanes[1:]:
            lane.features = first.features
        for name, context in self._networks.items():
            rows, last = first.contexts[name].rows, first.contexts[name].last
            for number, lane in enumerate(lanes[1:], start=1):
                lane.contexts[name] = ContextState(rows, last)
                for arena in context.plane.arenas:
                    part = arena.narrow(2, 0, rows)
                    arena.narrow(2, number * self._stride, rows).copy_(part)

    # Drafters without a context --------------------------------------------------------------

    def _draft_alone(
        self,
        drafter: Drafter,
        sequence: SequenceState,
        output: list[int],
        limits: Sequence[DraftLimit],
        labels: RoundLabels,
        column: int,
    ) -> None:
        """Label a drafter that may remember what it drafted, from the beginning on.

        It drafts its own rounds one after another. At a position inside one of them, a copy drafts
        that knows the rounds before that one.
        """
        prompt = sequence.tokens
        state = copy.deepcopy(drafter)
        state.open(sequence)
        ahead, turn = state, 1  # who has drafted the own round at hand, and where the next begins
        for at in range(1, len(output)):
            sequence.tokens = prompt + output[:at]
            sequence.num_cached = len(sequence.tokens) - 1
            if at == turn:
                state = ahead
            probe = copy.deepcopy(state)
            probe.catch_up([sequence])
            (tree,) = probe.draft([sequence], [limits[at - 1]])
            emitted = _emitted(tree, output[at:])
            labels.acceptance[at - 1, column] = emitted
            labels.drafted[at - 1, column] = tree.num_drafted
            if at == turn:
                ahead, turn = probe, at + emitted


def _reaches(context: DraftContext, length: int) -> bool:
    """Whether the network may draft behind `length` tokens (as `CatchUp` decides it)."""
    return length - 1 + context.span <= context.max_positions


def _emitted(tree: DraftTree, coming: Sequence[int]) -> int:
    """Tokens that a round adds: what the tree has of the coming ones, and the bonus token."""
    node, accepted = 0, 0
    for token in coming:
        child = tree.child(node, token)
        if child is None:
            break
        node, accepted = child, accepted + 1
    return min(accepted + 1, len(coming))
