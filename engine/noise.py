"""Gumbel noise from a hash of (seed, position, token), for samplers and for coupled drafters.

There is no generator state to get out of step: whoever asks for the noise of a token at a position,
in whatever order, for however few tokens, gets the same number. A drafter that perturbs its own
logits with this noise is coupled to the target's sample and is accepted more often (Daliri, Musco
and Suresh, 2024).

The hash is a 32-bit murmur finaliser, run twice per draw with keys derived from seed and position;
two draws make a 64-bit uniform. It works in int32, whose products wrap alike on CPU and CUDA, and
which is several times as fast as int64 on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MIX_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None))  # shift, then multiply
_POSITION_STEP = 0x9E3779B1  # odd, so that position -> position * step is one-to-one
_KEY_SALTS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # digits of pi

# Up to here all noise is computed exactly; above, contenders are found first.
_DIRECT_LIMIT = 1024


def fold_seed(seed: int) -> int:
    """Any Python int as the signed 64-bit number that `gumbel` accepts in a tensor of seeds.

    Ints of up to 64 bits, signed or not, keep their bit pattern; longer ones are folded by XOR.
    """
    folded = 0
    while True:
        folded ^= seed & _MASK64
        seed >>= 64
        if seed in (0, -1):
            return folded - (1 << 64) if folded >> 63 else folded


def gumbel(
    seed: int | Tensor,
    positions: int | Tensor,
    token_ids: Tensor,
    device: torch.device | str | None = None,
) -> Tensor:
    """Gumbel noise of each (seed, position, token), float64.

    Args:
        seed: one int, or an int64 tensor of seeds that went through `fold_seed`.
        positions: index in prompt + output; an int, or an int tensor, below 2**31.
        token_ids: int tensor. The three are broadcast together.
        device: where to compute; that of `token_ids` by default.
    """
    device = torch.device(device) if device is not None else token_ids.device
    token_ids = token_ids.to(device=device, dtype=torch.int32)
    if isinstance(seed, int) and isinstance(positions, int):
        return _noise(token_ids, position_keys(seed_bases(seed), positions))
    if isinstance(seed, int):
        bases = _int32(seed_bases(seed), device)
    else:
        seed = seed.to(device).unsqueeze(-1)
        bases = _mix_(_mix_(_low_word(seed) + _int32(_KEY_SALTS, device)) ^ _low_word(seed >> 32))
    if isinstance(positions, int):
        positions = torch.tensor(positions)
    steps = positions.to(device=device, dtype=torch.int32).unsqueeze(-1) * _signed(_POSITION_STEP)
    return _noise(token_ids, _mix_(bases + steps).movedim(-1, 0))


def seed_bases(seed: int) -> tuple[int, ...]:
    """The part of the four hash keys that depends on the seed only, as unsigned 32-bit ints."""
    folded = fold_seed(seed) & _MASK64
    low, high = folded & _MASK32, folded >> 32
    return tuple(_mix_int(_mix_int((low + salt) & _MASK32) ^ high) for salt in _KEY_SALTS)


def position_keys(bases: Sequence[int], position: int) -> list[int]:
    """The four hash keys of one position, as signed ints that fit an int32 operation."""
    offset = position * _POSITION_STEP
    return [_signed(_mix_int((base + offset) & _MASK32)) for base in bases]


def gumbel_argmax(scores: Tensor, token_ids: Tensor | None, keys: Sequence[int]) -> int:
    """The token with the largest `score + noise`.

    Args:
        scores: `[n]`; at least one is finite, none is NaN or +inf.
        token_ids: `[n]`, the tokens that the scores belong to; None: token i for entry i.
        keys: of the position (`position_keys`).
    """
    if token_ids is None:
        token_ids = torch.arange(scores.numel(), dtype=torch.int32, device=scores.device)
    else:
        token_ids = token_ids.to(torch.int32)
    if scores.numel() > _DIRECT_LIMIT:
        kept = _contenders(scores, token_ids, keys)
        scores, token_ids = scores[kept], token_ids[kept]
    return int(token_ids[(scores.double() + _noise(token_ids, keys)).argmax()])


def _contenders(scores: Tensor, token_ids: Tensor, keys: Sequence[int]) -> Tensor:
    """Indices of the few entries of `scores` [n] that can win the perturbed argmax.

    Uses half of the hash, in float32. That noise is within 0.001 of the exact one except at the
    ends of the uniform's range, where it may be too low by any amount and too high by less than 1:
    so entries at the ends are always kept, and so is all that comes within 1 of the best.
    """
    bits = (_draw(token_ids, keys[0], keys[1]) >> 1) & 0x7FFFFFFF
    ends = (bits < 1 << 12) | (bits > (1 << 31) - (1 << 17))
    perturbed = bits.float().add_(0.5).mul_(-(2.0**-31)).log1p_().neg_().log_().neg_()
    perturbed += scores - scores.amax()  # differences near 0 keep their precision at any scale
    return ((perturbed >= perturbed.amax() - 1.0) | ends).nonzero().flatten()


def _noise(token_ids: Tensor, keys: Sequence[int] | Tensor) -> Tensor:
    """Exact noise, float64. `token_ids` int32; `keys` four ints, or int32 [4, ...] to broadcast."""
    if not isinstance(keys, Tensor):
        keys = torch.tensor(keys, dtype=torch.int32, device=token_ids.device)
    keys = keys.reshape(4, *[1] * (token_ids.dim() - keys.dim() + 1), *keys.shape[1:])
    bits = _draw(token_ids, keys[0::2], keys[1::2])  # both draws at once: [2, ...]
    high, low = (bits.to(torch.int64) & _MASK32).double()
    # Large noise comes from *small* uniforms, where a float is most precise: 64 bits of tail.
    uniform = high.mul_(2.0**32).add_(low).add_(0.5).mul_(2.0**-64).clamp_(max=1.0 - 2.0**-53)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _draw(token_ids: Tensor, inner: int | Tensor, outer: int | Tensor) -> Tensor:
    """32 random bits per token. Two rounds, so that two positions that share one of the two keys
    (there are only 2**32 of each) still get unrelated noise."""
    return _mix_(_mix_(token_ids + inner) ^ outer)


def _mix_(words: Tensor) -> Tensor:
    """Finalise int32 words in place: every bit of the input reaches every bit of the output."""
    shifted = torch.empty_like(words)
    for shift, factor in _MIX_ROUNDS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1  # the shift drags the sign bit along
        words ^= shifted
        if factor is not None:
            words *= _signed(factor)
    return words


def _mix_int(word: int) -> int:
    """`_mix_` for one unsigned Python int: the keys of one row need no tensor operations."""
    for shift, factor in _MIX_ROUNDS:
        word ^= word >> shift
        if factor is not None:
            word = word * factor & _MASK32
    return word


def _signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


def _int32(words: Sequence[int], device: torch.device) -> Tensor:
    """Unsigned 32-bit ints as an int32 tensor."""
    return torch.tensor([_signed(word) for word in words], dtype=torch.int32, device=device)


def _low_word(words: Tensor) -> Tensor:
    """Low 32 bits of int64 words, as int32."""
    low = words & _MASK32
    return torch.where(low > 0x7FFFFFFF, low - (1 << 32), low).to(torch.int32)
