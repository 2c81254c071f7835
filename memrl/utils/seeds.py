"""Seeds and ids computed from what they identify, the same in every process and on every machine."""

import hashlib
import struct


def row_seed(*identity: int) -> int:
    """A 63-bit seed computed from a row's identity, for instance (seed, step, group, rollout, turn)."""
    digest = hashlib.blake2b(struct.pack(f"<{len(identity)}q", *identity), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stable_id(*parts: object) -> int:
    """A 63-bit number computed from the parts' texts."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
