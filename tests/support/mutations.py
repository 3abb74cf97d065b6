"""Damage files as disks, networks and people do: edits of bytes that know nothing of the format."""

from __future__ import annotations

import random

EDGES = [0, 1, 3, 4, 7, 8, 127, 255, 256, 0x7FFF, 0xFFFF, 1 << 20, (1 << 24) + 1, 1 << 26, (1 << 30) - 1, 1 << 30]
EDGES += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
MAGICS = [b"\0\0\x08\x03", b"\0\0\x0d\x03", b"\x1f\x8b\x08\0", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x07", b"\x89PNG"]
MAGICS += [b"\x55\x4c\x3d\x1e", b"\x93NUMPY\x02\0", b"\xff\xd8\xff\xe0", b"ustar\0", b"\x80\x04", b"x\x9c", b"GIF89a"]


def flipped(data: bytes, place: int, bits: int = 1) -> bytes:
    """Change some bits of one byte; `place` may count from the end."""
    changed = bytearray(data)
    changed[place] ^= bits
    return bytes(changed)


def blind_edit(rng: random.Random, data: bytes) -> bytes:
    """Flip bits, change a number, a magic or a byte, or cut, extend, delete, repeat, insert or exchange stretches."""

    def anywhere() -> int:
        """Half of the time among the first bytes, where the headers are."""
        return rng.randrange(min(len(data), rng.choice([16, 64, 256, 1 << 30, 1 << 30])) + 1)

    edit = rng.choice(["flip", "number", "magic", "byte", "cut", "extend", "delete", "repeat", "insert", "exchange"])
    place = anywhere()
    size = rng.choice([1, 2, 4, 4, 8, 12, 40, 512])
    before, stretch, after = data[:place], data[place : place + size], data[place + size :]
    if edit == "flip":
        for _ in range(rng.choice([1, 1, 1, 2, 5, 20]) if data else 0):
            data = flipped(data, min(anywhere(), len(data) - 1), 1 << rng.randrange(8))
        return data
    if edit == "number" and size <= 8:  # at the edge of something, or near the one that was there
        order = rng.choice(["little", "big"])
        number = rng.choice([*EDGES, *[int.from_bytes(stretch, order)] * 4]) + rng.choice([0, -8, -1, 1, 8])
        return before + (number % (1 << 8 * size)).to_bytes(size, order) + after
    if edit == "magic":
        magic = rng.choice(MAGICS)
        place = rng.choice([0, 0, 0, place])
        return data[:place] + magic + data[place + len(magic) :]
    if edit == "exchange":  # such as two fields of a header, or two tensors
        other = place + size + rng.randrange(64)
        return before + data[other : other + size] + data[place + size : other] + stretch + data[other + size :]
    return {
        "cut": before,
        "extend": data + rng.choice([b"\0", b" ", rng.randbytes(8), data[-8:], data, bytes(4096)]),
        "delete": before + after,
        "repeat": before + stretch * rng.choice([2, 50]) + after,
        "insert": before + rng.randbytes(size % 9) + data[place:],
    }.get(edit, before + bytes([rng.choice([0, 0xFF, *b' "{}[]:,0\\n', rng.randrange(256)])]) + data[place + 1 :])


def blind_edits(rng: random.Random, data: bytes) -> bytes:
    """Up to three edits, mostly one."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        data = blind_edit(rng, data)
    return data
